// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "status_text.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "table.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

/// Fields of another version's manager may be missing or of another type: they show as "-".
const Json* field(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

/// A plain value, or a list of them. Nothing deeper: dump() recurses as deep as its text goes.
std::string shown(const Json& value) {
  const bool deep = std::any_of(value.begin(), value.end(),
                                [](const Json& inner) { return inner.is_structured(); });
  return value.is_object() || deep ? "-" : value.dump();
}

std::string text(const Json& object, const char* name) {
  const Json* value = field(object, name);
  if (value == nullptr) return "-";
  if (value->is_string()) return value->get<std::string>();
  if (value->is_number_unsigned()) return with_separators(value->get<std::uint64_t>());
  if (value->is_boolean()) return value->get<bool>() ? "yes" : "no";
  return shown(*value);
}

/// A number without separators: something to type again.
std::string pid(const Json& object) {
  const Json* value = field(object, "pid");
  return value == nullptr ? "-" : shown(*value);
}

std::string bytes(const Json& object, const char* name) {
  const Json* value = field(object, name);
  return value != nullptr && value->is_number_unsigned()
             ? ipc::format_size(value->get<std::uint64_t>())
             : "-";
}

std::string uptime(const Json& status) {
  const Json* value = field(status, "uptime");
  if (value == nullptr || !value->is_number()) return "-";
  constexpr double kMost = 1e12;  // Seconds; a number of another program may not fit an integer.
  const auto uptime = value->get<double>();
  if (!(uptime >= 0) || uptime > kMost) return "-";
  const auto seconds = static_cast<std::uint64_t>(uptime);
  constexpr std::uint64_t kMinute = 60;
  constexpr std::uint64_t kHour = 60 * kMinute;
  constexpr std::uint64_t kDay = 24 * kHour;
  if (seconds >= kDay) return fmt::format("{} d {} h", seconds / kDay, seconds % kDay / kHour);
  if (seconds >= kHour) {
    return fmt::format("{} h {} min", seconds / kHour, seconds % kHour / kMinute);
  }
  if (seconds >= kMinute) return fmt::format("{} min {} s", seconds / kMinute, seconds % kMinute);
  return fmt::format("{} s", seconds);
}

const Json& member(const Json& object, const char* name) {
  static const Json kNothing = Json::object();
  const Json* value = field(object, name);
  return value == nullptr ? kNothing : *value;
}

/// Of a job's part on one rank, to or from it: what it waited for its turn, and what it took then.
std::string average_of(const Json& way) {
  const auto number = [&way](const char* name) {
    const Json* value = field(way, name);
    return value != nullptr && value->is_number_unsigned() ? value->get<std::uint64_t>() : 0;
  };
  const std::uint64_t answers = number("answers");
  if (answers == 0) return "none";
  const auto ms = [&](const char* name) {
    return static_cast<double>(number(name)) / static_cast<double>(answers) / 1000;
  };
  return fmt::format("{:.3f} + {:.3f} ms", ms("queued_us"), ms("copied_us"));
}

void describe_host(const Json& status, std::string& out) {
  const Json& pool = member(status, "pool");
  const Json& index = member(status, "index");
  Table table({{""}, {""}});
  table.add({"host memory", fmt::format("{} of {} used, {} blocks", bytes(pool, "used"),
                                        bytes(pool, "bytes"), text(pool, "blocks"))});
  table.add({"prefix index", fmt::format("{} blocks, {} pinned, {} being stored, {} evicted so far",
                                         text(index, "blocks"), text(index, "pinned"),
                                         text(index, "reserved"), text(index, "evicted"))});
  if (const Json* events = field(status, "kv_events"); events != nullptr) {
    table.add({"KV events", fmt::format("{} in {} batches told at {}, {} batches dropped",
                                        text(*events, "events"), text(*events, "batches"),
                                        text(*events, "endpoint"), text(*events, "dropped"))});
  }
  out += table.render("  ");
}

/// What each namespace has; nothing where there is none.
void describe_namespaces(const Json& status, std::string& out) {
  Table table({{"namespace"},
               {"blocks", Align::kRight},
               {"bytes", Align::kRight},
               {"share", Align::kRight},
               {"limit", Align::kRight},
               {"hits", Align::kRight},
               {"misses", Align::kRight},
               {"stored", Align::kRight},
               {"evicted", Align::kRight},
               {"for others", Align::kRight},
               {"refused", Align::kRight}});
  for (const Json& one : member(status, "namespaces")) {
    table.add({text(one, "name"), text(one, "blocks"), bytes(one, "bytes"),
               bytes(one, "soft_bytes"), bytes(one, "hard_bytes"), text(one, "hits"),
               text(one, "misses"), text(one, "stored"), text(one, "evicted"),
               text(one, "evicted_for_others"), text(one, "refused_quota")});
  }
  if (!table.empty()) out += "\n" + table.render("  ");
}

void add_rank_row(Table& table, const Json& rank, const char* kind) {
  const Json* process = field(rank, kind);
  if (process == nullptr) {
    table.add({text(rank, "rank"), kind, "-", "absent"});
    return;
  }
  std::string state = text(*process, "phase");
  if (const Json* mapped = field(*process, "mapped"); mapped != nullptr && *mapped == false) {
    state += ", not mapped";
  }
  if (const Json* connected = field(*process, "connected");
      connected != nullptr && *connected == false) {
    state += ", silent";
  }
  table.add(
      {text(rank, "rank"), kind, pid(*process), state, text(*process, "epoch"),
       fmt::format("{} of {}", bytes(*process, "device_free"), bytes(*process, "device_total")),
       bytes(*process, "quarantined_bytes"), text(*process, "note")});
}

/// Of a list of names.
std::string names(const Json& object, const char* key) {
  const Json* list = field(object, key);
  if (list == nullptr || !list->is_array()) return {};
  std::string joined;
  for (const Json& name : *list) {
    if (!name.is_string()) continue;
    if (!joined.empty()) joined += ", ";
    joined += name.get<std::string>();
  }
  return joined;
}

void describe_engine(const Json& engine, std::string& out) {
  const Json& jobs = member(engine, "jobs");
  out += fmt::format("\nengine {}: {}, generation {}, offload {}\n", text(engine, "name"),
                     text(engine, "phase"), shown(member(engine, "generation")),
                     member(engine, "offload_ready") == true ? "ready" : "not ready");
  Table table({{""}, {""}});
  table.add(
      {"geometry",
       fmt::format("{}, blocks on each device {}, arena made by the {}", text(engine, "geometry"),
                   shown(member(engine, "group_blocks")), text(engine, "cache_owner"))});
  table.add(
      {"jobs", fmt::format("{} queued, {} running, {} done, {} failed, {} cancelled, {} stale",
                           text(jobs, "queued"), text(jobs, "running"), text(jobs, "done"),
                           text(jobs, "failed"), text(jobs, "cancelled"), text(jobs, "stale"))});
  const Json* share = field(engine, "share");
  const bool is_weighed = share != nullptr && *share != 1;
  table.add({"moved", fmt::format("{} to host, {} to device{}", bytes(engine, "bytes_to_host"),
                                  bytes(engine, "bytes_to_device"),
                                  is_weighed ? ", share " + text(engine, "share") : "")});
  table.add({"a job's time", fmt::format("queued + copied, on average: to host {}, to device {}",
                                         average_of(member(engine, "to_host")),
                                         average_of(member(engine, "to_device")))});
  const Json* paused = field(engine, "paused");
  const bool is_paused = paused != nullptr && paused->is_string();
  table.add(
      {"lifecycle",
       fmt::format("{}{} flushes, {} clears, {} re-inits",
                   is_paused ? fmt::format("paused ({}), ", paused->get<std::string>()) : "",
                   text(engine, "flushes"), text(engine, "clears"), text(engine, "reinits"))});
  if (const std::string released = names(engine, "released"); !released.empty()) {
    table.add({"released", released});
  }
  if (member(engine, "weights_lost") == true) {
    table.add({"weights", "lost: released without a backup, and not updated since"});
  }
  if (const std::string note = text(engine, "note"); note != "-" && !note.empty()) {
    table.add({"note", note});
  }
  if (const std::string refused = text(engine, "last_refusal");
      refused != "-" && !refused.empty()) {
    table.add({"last refused", refused});
  }
  out += table.render("  ");
  Table ranks({{"rank", Align::kRight},
               {"process"},
               {"pid", Align::kRight},
               {"state"},
               {"epoch", Align::kRight},
               {"device free"},
               {"quarantined", Align::kRight},
               {"note"}});
  for (const Json& rank : member(engine, "ranks")) {
    add_rank_row(ranks, rank, "worker");
    add_rank_row(ranks, rank, "mover");
  }
  if (!ranks.empty()) out += ranks.render("  ");
}

/// What stands in the way at one process of a rank, if anything.
void describe_process(const Json& rank, const char* kind, std::vector<std::string>& found) {
  const std::string name = fmt::format("{}/{}", kind, text(rank, "rank"));
  const Json* process = field(rank, kind);
  if (process == nullptr) {
    found.push_back(name + " has not registered");
    return;
  }
  const auto is = [process](const char* flag, bool wanted) {
    const Json* value = field(*process, flag);
    return value != nullptr && *value == wanted;
  };
  std::vector<std::string> states;
  if (is("connected", false)) states.emplace_back("is silent");
  if (is("mapped", false)) states.emplace_back("has no arena mapped");
  const Json* leases = field(*process, "living_leases");
  if (leases != nullptr && leases->is_number_unsigned() && leases->get<std::uint64_t>() > 1) {
    states.push_back(fmt::format("sees its arena held by {} processes", leases->dump()));
  }
  const std::string note = text(*process, "note");
  const bool has_note = note != "-" && !note.empty();
  if (states.empty() && !has_note) return;
  found.push_back(fmt::format("{} (pid {}){}{}{}", name, pid(*process), states.empty() ? "" : " ",
                              fmt::join(states, ", "), has_note ? ": " + note : ""));
}

}  // namespace

std::string describe_missing(std::string_view json, std::string_view engine_name) {
  const Json status = Json::parse(json, nullptr, false);
  std::vector<std::string> found;
  for (const Json& engine : member(status, "engines")) {
    if (text(engine, "name") != engine_name) continue;
    if (const std::string note = text(engine, "note"); note != "-" && !note.empty()) {
      found.push_back(note);
    }
    for (const Json& rank : member(engine, "ranks")) {
      for (const char* kind : {"worker", "mover"}) {
        describe_process(rank, kind, found);
      }
    }
  }
  if (!status.is_object()) return "the manager's status cannot be read";
  if (found.empty()) return "no process gives a reason; 'kvferry status' shows all of them";
  return fmt::format("{}", fmt::join(found, "; "));
}

ipc::Result<std::string> describe_status(std::string_view json) {
  const Json status = Json::parse(json, nullptr, false);
  if (!status.is_object()) {
    return KVFERRY_ERROR(kProtocol, "the manager's status is not a JSON object; try --json");
  }
  std::string out = fmt::format("manager of instance {}: pid {}, up {}\n", text(status, "instance"),
                                pid(status), uptime(status));
  describe_host(status, out);
  describe_namespaces(status, out);
  const Json& engines = member(status, "engines");
  if (engines.empty()) out += "\nno engine has registered yet\n";
  for (const Json& engine : engines) describe_engine(engine, out);
  return out;
}

}  // namespace kvferry::cli
