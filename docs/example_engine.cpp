// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
//
// A complete small engine: serves one prompt twice. The first time its blocks are computed and
// stored to host memory; the second time, with other device blocks, they are loaded.
// Usage: example_engine [ENGINE [RANKS [GEOMETRY]]], beside a manager, a worker and a mover per
// rank, say `kvferry manager`, `kvferry worker --geometry tiny` and `kvferry mover --geometry
// tiny`.
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/worker/client.hpp"

#include <poll.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace {

using namespace std::chrono_literals;
using kvferry::ipc::chain_block_hash;
using kvferry::ipc::Error;
using kvferry::ipc::Geometry;
using kvferry::worker::BlockId;
using kvferry::worker::Client;
using kvferry::worker::ClientOptions;
using kvferry::worker::Completion;
using kvferry::worker::Deadline;
using kvferry::worker::Digest;
using kvferry::worker::GroupId;
using kvferry::worker::JobId;
using kvferry::worker::LoadItem;
using kvferry::worker::PinnedBlock;
using kvferry::worker::Reservation;
using kvferry::worker::Result;
using kvferry::worker::Status;
using kvferry::worker::StoreItem;
using kvferry::worker::StoreTarget;

constexpr GroupId kMain{0};
constexpr std::size_t kPromptBlocks = 4;

/// Hashes of the full blocks of a prompt; each covers everything before it, too.
std::vector<Digest> hash_prompt(const std::vector<std::uint32_t>& tokens,
                                std::size_t tokens_per_block) {
  std::vector<Digest> hashes;
  Digest parent;
  for (std::size_t at = 0; at + tokens_per_block <= tokens.size(); at += tokens_per_block) {
    parent = chain_block_hash(parent, &tokens[at], tokens_per_block * sizeof(tokens[at]));
    hashes.push_back(parent);
  }
  return hashes;
}

/// An engine's event loop would watch client.fd() beside everything else that it waits for.
Result<Completion> wait_for(Client& client, JobId job) {
  const Deadline deadline = Deadline::after(30s);
  while (!deadline.expired()) {
    for (Completion& completion : client.poll(16)) {
      if (completion.job == job) return std::move(completion);
    }
    pollfd entry{client.fd(), POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_timeout_ms());
  }
  // The job runs on, and its blocks must not be used before its completion has come.
  return Error{kvferry::worker::ErrorCode::kTimeout, "a job did not end within 30 s"};
}

/// The first blocks of the prefix that are in host memory, which are not evicted until unpinned.
Result<std::vector<PinnedBlock>> pin_prefix(Client& client, std::span<const Digest> hashes) {
  std::vector<PinnedBlock> blocks;
  for (const Digest& hash : hashes) blocks.push_back({kMain, hash});
  KVFERRY_ASSIGN(const std::vector<bool> there, client.pin_blocks(blocks, Deadline::after(1s)));
  std::vector<PinnedBlock> behind;  // What has gone, others may be behind, of no use without it.
  const auto gone = static_cast<std::size_t>(std::find(there.begin(), there.end(), false) -
                                             there.begin());
  for (std::size_t i = gone; i < blocks.size(); ++i) {
    if (there[i]) behind.push_back(blocks[i]);
  }
  (void)client.unpin_blocks(behind);
  blocks.resize(gone);
  return blocks;
}

/// Loads what host memory has of the prompt's beginning; returns how many blocks that were.
Result<std::size_t> load_prefix(Client& client,
                                const std::vector<Digest>& hashes,
                                const std::vector<BlockId>& blocks) {
  KVFERRY_ASSIGN(const auto found, client.match_prefix(hashes));
  // A look keeps nothing, and what it found may have been evicted since: from here on it stays.
  KVFERRY_ASSIGN(const auto pinned, pin_prefix(client, std::span(hashes).first(found.usable)));
  std::vector<LoadItem> items;
  for (std::size_t i = 0; i < pinned.size(); ++i) {
    items.push_back({kMain, blocks[i], pinned[i].key});
  }
  if (items.empty()) return std::size_t{0};
  // Said once for each request, so that host memory keeps what requests use.
  (void)client.use_prefix(std::span(hashes).first(items.size()));
  const auto job = client.submit_load(items, kvferry::ipc::Urgency::kOrdinary);
  // The load keeps what it reads; the pins were for the time before. One that is busy would keep
  // them until it has gone.
  (void)client.unpin_blocks(pinned);
  if (!job) return job.error();
  KVFERRY_ASSIGN(const Completion done, wait_for(client, *job));
  // Cleared, a dead process, a full queue: the first block that failed is where to compute on.
  std::size_t loaded = 0;
  while (loaded < done.results.size() && done.results[loaded] == 0) ++loaded;
  return loaded;
}

/// Stores blocks whose computation was observed complete on every rank.
Status store(Client& client,
             const std::vector<Digest>& hashes,
             const std::vector<BlockId>& blocks,
             std::size_t first) {
  std::vector<StoreTarget> targets;
  for (std::size_t i = first; i < hashes.size(); ++i) {
    targets.push_back({kMain, hashes[i], i == 0 ? Digest{} : hashes[i - 1]});
  }
  std::vector<StoreItem> items;
  for (std::size_t i = 0; i < targets.size(); ++i) items.push_back({kMain, blocks[first + i], i});
  // Nobody waits for the manager here; an engine goes on and takes the completion from poll().
  KVFERRY_ASSIGN(const JobId job, client.offer_store(targets, items));
  KVFERRY_ASSIGN(const Completion done, wait_for(client, job));
  // The others are there already, or have no room: nothing to do for these.
  std::cout << "stored " << std::count(done.results.begin(), done.results.end(), 0) << " blocks"
            << (done.message.empty() ? "" : ", some failed: " + done.message) << std::endl;
  return kvferry::ipc::ok();
}

Status serve_prompt(Client& client, const std::vector<Digest>& hashes, std::uint32_t first_block) {
  std::vector<BlockId> blocks;
  for (std::uint32_t i = 0; i < hashes.size(); ++i) blocks.push_back(BlockId{first_block + i});
  KVFERRY_ASSIGN(const std::size_t loaded, load_prefix(client, hashes, blocks));
  std::cout << "loaded " << loaded << " of " << hashes.size() << " blocks" << std::endl;
  if (loaded == hashes.size()) return kvferry::ipc::ok();
  // Here the engine computes blocks[loaded..] on its workers and waits until that is done.
  return store(client, hashes, blocks, loaded);
}

Status run(const std::string& engine, std::uint32_t ranks, const std::string& geometry_name) {
  // The geometry that the workers were started with: a client of another one is refused, since it
  // would take bytes for something else than they are.
  KVFERRY_ASSIGN(const Geometry geometry, kvferry::ipc::load_geometry(geometry_name, ranks));
  ClientOptions options;
  options.engine = engine;
  options.ranks = ranks;
  options.identity.model = "example";
  options.identity.fingerprint = geometry.fingerprint(kvferry::ipc::ArenaOrder::kLayerFirst);
  options.identity.weights = Digest::hash("example-weights", 15);
  KVFERRY_ASSIGN(const auto client, Client::connect(options, Deadline::after(5s)));
  KVFERRY_TRY(client->wait_ready(true, Deadline::after(30s)));
  // Looking at the state acknowledges its generation. When state.contents grows, every device block
  // is empty; another generation alone is another manager's, of blocks that hold what they held.
  const auto& state = client->state();
  const std::uint32_t gpu_blocks = state.group_blocks.empty() ? 0 : state.group_blocks[0];
  std::cout << "ready: generation " << state.generation << ", " << gpu_blocks << " device blocks"
            << std::endl;

  std::vector<std::uint32_t> tokens(kPromptBlocks * geometry.tokens_per_block);
  std::iota(tokens.begin(), tokens.end(), 1000U);
  const std::vector<Digest> hashes = hash_prompt(tokens, geometry.tokens_per_block);
  KVFERRY_TRY(serve_prompt(*client, hashes, 0));
  KVFERRY_TRY(serve_prompt(*client, hashes, gpu_blocks / 2));
  client->close();
  return kvferry::ipc::ok();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string engine = argc > 1 ? argv[1] : "default";
  const std::string ranks_text = argc > 2 ? argv[2] : "1";
  std::uint32_t ranks = 0;
  const char* end = ranks_text.data() + ranks_text.size();
  if (std::from_chars(ranks_text.data(), end, ranks).ptr != end || ranks == 0) {
    std::cerr << "usage: example_engine [ENGINE [RANKS [GEOMETRY]]]\n";
    return 2;
  }
  const std::string geometry = argc > 3 ? argv[3] : "tiny";
  if (const Status status = run(engine, ranks, geometry); !status) {
    std::cerr << "example_engine: " << status.error().to_string() << '\n';
    return 1;
  }
  return 0;
}
