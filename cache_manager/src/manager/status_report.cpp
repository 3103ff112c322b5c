// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/status_report.hpp"

#include "manager/evict_ahead.hpp"
#include "manager/kv_events.hpp"

#include <nlohmann/json.hpp>
#include <unistd.h>

#include <chrono>

namespace kvferry::cache_manager {
namespace {

using nlohmann::json;

json tags_json(ipc::MemoryTags tags) {
  json names = json::array();
  for (const ipc::MemoryTag tag : ipc::kMemoryTags) {
    if (tags.has(tag)) names.push_back(std::string(ipc::to_string(tag)));
  }
  return names;
}

json rank_peer_json(const std::optional<RankPeer>& peer) {
  if (!peer) {
    return nullptr;
  }
  const ipc::RankState& state = peer->state;
  return {{"pid", peer->pid},
          {"incarnation", peer->id.hex()},
          {"connected", peer->connected},
          {"session", state.session.hex()},
          {"epoch", state.epoch.value},
          {"phase", std::string(ipc::to_string(state.phase))},
          {"mapped", state.mapped},
          {"prepared_by", state.prepared_by.value},
          {"living_leases", state.lease_holders.size()},
          {"released", tags_json(state.released)},
          {"weights_lost", state.weights_lost},
          {"quarantined_bytes", state.quarantined_bytes},
          {"device_free", state.device_free_bytes},
          {"device_total", state.device_total_bytes},
          {"note", state.note}};
}

json way_json(const JobCounters::Way& way) {
  return {{"answers", way.answers},
          {"queued_us", static_cast<std::uint64_t>(way.queued.count())},
          {"copied_us", static_cast<std::uint64_t>(way.copied.count())}};
}

json engine_json(const EngineRecord& engine, const JobCounters& jobs, std::uint32_t share) {
  json ranks = json::array();
  for (std::uint32_t rank = 0; rank < engine.ranks().size(); ++rank) {
    ranks.push_back({{"rank", rank},
                     {"worker", rank_peer_json(engine.ranks()[rank].worker)},
                     {"mover", rank_peer_json(engine.ranks()[rank].mover)}});
  }
  const auto& config = engine.config();
  json described = {
      {"name", engine.name()},
      {"geometry", config ? json(config->geometry.name) : json(nullptr)},
      {"fingerprint", config ? json(config->fingerprint.hex()) : json(nullptr)},
      {"cache_owner",
       config ? json(std::string(ipc::to_string(config->cache_owner))) : json(nullptr)},
      {"generation", engine.generation()},
      {"phase", std::string(to_string(engine.phase()))},
      {"offload_ready", engine.offload_ready()},
      {"note", engine.view().note},
      {"last_refusal", engine.refusal()},
      {"group_blocks", engine.group_blocks()},
      {"jobs",
       {{"queued", jobs.queued},
        {"running", jobs.running},
        {"done", jobs.done},
        {"failed", jobs.failed},
        {"cancelled", jobs.cancelled},
        {"stale", jobs.stale}}},
      {"share", share},
      {"bytes_to_host", jobs.to_host.bytes},
      {"bytes_to_device", jobs.to_device.bytes},
      {"to_host", way_json(jobs.to_host)},
      {"to_device", way_json(jobs.to_device)},
      {"clears", engine.clears()},
      {"reinits", engine.reinits()},
      {"flushes", engine.flushes()},
      {"updates", engine.updates()},
      {"released", tags_json(engine.released())},
      {"weights_lost", engine.weights_lost()},
      {"weights", engine.weights().is_zero() ? json(nullptr) : json(engine.weights().hex())},
      {"paused",
       engine.paused() ? json(std::string(ipc::to_string(*engine.paused()))) : json(nullptr)},
  };
  described["ranks"] = std::move(ranks);
  return described;
}

/// What an earlier manager had left; null when the pool is this one's from the start.
json kept_of(const ManagerContext& context) {
  if (!context.adopted) return nullptr;
  return {{"found", context.adopted->found},
          {"adopted", context.adopted->adopted},
          {"dropped", context.adopted->dropped},
          {"unsummed", context.adopted->unsummed},
          {"stored_anew", context.adopted->stored_anew},
          {"awaited", context.adopted->awaited},
          {"sequence_blocks", context.adopted->sequences},
          {"doubtful", context.adopted->doubtful}};
}

json namespaces_json(const ManagerContext& context) {
  json described = json::array();
  std::map<const NamespaceAccount*, std::size_t> sequences = context.sequences.blocks_by_account();
  for (const auto& [name, account] : context.index.accounts().all()) {
    const NamespaceAccount::Limits& limits = account->limits();
    const NamespaceAccount::Counters& counters = account->counters;
    const bool has_limit = limits.hard != NamespaceAccount::Limits{}.hard;
    described.push_back({{"name", name},
                         {"has_key", account->has_key()},
                         {"soft_bytes", limits.soft},
                         {"hard_bytes", has_limit ? json(limits.hard) : json(nullptr)},
                         {"bytes", account->bytes()},
                         {"blocks", account->blocks()},
                         {"sequence_blocks", sequences[account.get()]},
                         {"hits", counters.hits},
                         {"misses", counters.misses},
                         {"stored", counters.stored},
                         {"evicted", counters.evicted},
                         {"evicted_for_others", counters.evicted_for_others},
                         {"refused_quota", counters.refused_quota},
                         {"refused_room", counters.refused_room}});
  }
  return described;
}

json kv_events_json(const KvEvents* events) {
  if (events == nullptr) return nullptr;
  const ipc::KvEventPublisher& publisher = events->publisher();
  const ipc::KvEventPublisher::Stats stats = publisher.stats();
  return {
      {"endpoint", publisher.endpoint()},
      {"snapshot_endpoint",
       publisher.snapshot_endpoint().empty() ? json(nullptr) : json(publisher.snapshot_endpoint())},
      {"events", stats.events},
      {"batches", stats.batches},
      {"dropped", stats.dropped},
      {"requests", stats.requests},
      {"refused", stats.refused},
      {"kept_batches", stats.kept_batches},
      {"kept_bytes", stats.kept_bytes}};
}

}  // namespace

std::string status_json(const ManagerContext& context,
                        std::size_t unread_completions,
                        std::size_t sums_awaited,
                        ipc::TimePoint started,
                        std::size_t proofs_open) {
  const HostPool::Stats pool = context.pool.stats();
  const PrefixIndex::Stats& index = context.index.stats();
  const ipc::PrefixTable::Stats& table = context.index.table().stats();
  json engines = json::array();
  for (const auto& [name, engine] : context.directory.engines()) {
    engines.push_back(
        engine_json(*engine, context.jobs.counters(engine->id()), context.config.share_of(name)));
  }
  json peers = json::array();
  for (const auto& [id, peer] : context.directory.peers()) {
    peers.push_back({{"incarnation", id.hex()},
                     {"kind", std::string(ipc::to_string(peer.kind))},
                     {"name", peer.name},
                     {"pid", peer.pid}});
  }
  const json report = {
      {"instance", context.config.instance},
      {"pid", ::getpid()},
      {"uptime", std::chrono::duration<double>(ipc::MonotonicClock::now() - started).count()},
      {"pool",
       {{"bytes", pool.bytes},
        {"used", pool.used_bytes},
        {"free", pool.free_bytes},
        {"blocks", pool.blocks},
        {"slabs", pool.slabs},
        {"ready_bytes", pool.ready_bytes},
        {"page_bytes", pool.page_bytes},
        {"free_pages", pool.free_pages},
        {"placed_blocks", pool.placed_blocks},
        {"placed_extents", pool.placed_extents},
        {"id", context.catalogue.id().hex()},
        {"integrity",
         {{"summed", context.integrity.summed},
          {"awaited", sums_awaited},
          {"checked", context.integrity.checked},
          {"corrupt", context.integrity.corrupt},
          {"unchecked", context.integrity.unchecked},
          {"unsummed", context.catalogue.unsummed()}}},
        {"kept", kept_of(context)}}},
      {"index",
       {{"blocks", index.visible},
        {"pinned", index.pinned},
        {"reserved", index.reserved},
        {"evicted", index.evicted},
        {"evicted_ahead", context.ahead->evicted()},
        {"retained", context.index.retained()},
        {"table_bytes", table.bytes},
        {"unkept", table.unkept}}},
      {"sequences",
       {{"count", context.sequences.sequences()}, {"blocks", context.sequences.blocks()}}},
      {"namespaces", namespaces_json(context)},
      {"kv_events", kv_events_json(context.kv_events)},
      {"engines", std::move(engines)},
      {"peers", std::move(peers)},
      {"unread_completions", unread_completions},
      {"proofs_open", proofs_open},
      {"protocol_errors", context.server.protocol_errors() + context.protocol_errors},
  };
  // Names come from peers: bytes that are no UTF-8 must not make status fail.
  return report.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace kvferry::cache_manager
