// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/rank/pool_keeper.hpp"
#include "options.hpp"
#include "print.hpp"
#include "table.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

/// gc: what processes that are gone have left behind.
namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

enum class Fate : std::uint8_t { kInUse, kKept, kLetGo, kFailed, kUnknown };

/// As JSON has it.
std::string_view name_of(Fate fate) {
  switch (fate) {
    case Fate::kInUse: return "in_use";
    case Fate::kKept: return "kept";
    case Fate::kLetGo: return "let_go";
    case Fate::kFailed: return "failed";
    case Fate::kUnknown: return "unknown";
  }
  return "";
}

std::string_view to_string(Fate fate) {
  switch (fate) {
    case Fate::kInUse: return "in use by its manager";
    case Fate::kKept: return "kept, nobody uses it";
    case Fate::kLetGo: return "let go";
    case Fate::kFailed: return "failed";
    case Fate::kUnknown: return "does not answer";
  }
  return "";
}

struct Pool {
  std::string instance;
  std::string holder;
  pid_t pid = 0;
  std::string id;
  std::uint64_t bytes = 0;
  Fate fate = Fate::kInUse;
};

struct Remains {
  std::vector<Pool> pools;
  std::vector<std::string> names;  ///< INSTANCE/NAME, or all of INSTANCE: removed.
  bool failed = false;
};

bool has_manager(const ipc::RuntimeDir& dir) {
  const auto names = dir.held_names();
  return names && std::any_of(names->begin(), names->end(),
                              [](const ipc::HeldName& held) { return held.name == "manager"; });
}

/// Of one instance.
void collect(const ipc::RuntimeDir& dir,
             bool only_looks,
             std::chrono::milliseconds deadline,
             Remains& remains) {
  const ipc::Deadline until = ipc::Deadline::after(deadline);
  const ipc::KeptPools found = ipc::find_kept_pools(dir, /*succeeds=*/false, until);
  for (const ipc::SilentKeeper& silent : found.silent) {
    remains.failed = true;
    remains.pools.push_back({dir.instance(), silent.holder, silent.pid, "", 0, Fate::kUnknown});
    print_err(
        "kvferry gc: {} of instance {} (pid {}) does not say whether it keeps a pool: {}; if it is "
        "stopped, let it go on or end it\n",
        silent.holder, dir.instance(), silent.pid, silent.error.to_string());
  }
  for (const ipc::KeptPool& kept : found.pools) {
    Pool pool{dir.instance(),         kept.holder, kept.pid, kept.memory.id.hex(),
              kept.memory.pool_bytes, Fate::kInUse};
    // A manager that is starting will want it.
    if (!kept.in_use && !has_manager(dir)) {
      pool.fate = Fate::kKept;
      if (!only_looks) {
        const ipc::Status dropped = ipc::drop_kept_pool(kept, until);
        pool.fate = dropped ? Fate::kLetGo : Fate::kFailed;
        if (!dropped) {
          remains.failed = true;
          print_err("kvferry gc: {} of instance {}: {}\n", kept.holder, dir.instance(),
                    dropped.error().to_string());
        }
      }
    }
    remains.pools.push_back(std::move(pool));
  }
  if (only_looks) return;
  for (const std::string& name : dir.remove_stale_names()) {
    remains.names.push_back(dir.instance() + "/" + name);
  }
}

/// With all that is in it, records of what was done there included; while somebody is in it, it
/// stays.
void remove_folder(const ipc::RuntimeDir& dir, Remains& remains) {
  const std::string base = dir.path().parent_path();
  {
    // Whoever lets go of it last removes it.
    const auto held = ipc::RuntimeDir::open(base, dir.instance());
    if (!held) {
      remains.failed = true;
      print_err("kvferry gc: instance {}: {}\n", dir.instance(), held.error().to_string());
      return;
    }
  }
  if (!ipc::RuntimeDir::find(base, dir.instance())) remains.names.push_back(dir.instance());
}

void print_json(const Remains& remains) {
  Json pools = Json::array();
  for (const Pool& pool : remains.pools) {
    pools.push_back({{"instance", pool.instance},
                     {"holder", pool.holder},
                     {"pid", pool.pid},
                     {"pool", pool.id},
                     {"bytes", pool.bytes},
                     {"state", name_of(pool.fate)}});
  }
  print_out("{}\n", Json{{"pools", pools}, {"names_removed", remains.names}}.dump(2));
}

void print_text(const Remains& remains, bool only_looks) {
  Table table(
      {{"instance"}, {"pool"}, {"size", Align::kRight}, {"kept by"}, {"pid", Align::kRight}, {""}});
  for (const Pool& pool : remains.pools) {
    const bool is_known = pool.fate != Fate::kUnknown;
    table.add({pool.instance, is_known ? pool.id.substr(0, 8) : "?",
               is_known ? ipc::format_size(pool.bytes) : "?", pool.holder, std::to_string(pool.pid),
               std::string(to_string(pool.fate))});
  }
  if (!table.empty()) print_out("{}", table.render());
  for (const std::string& name : remains.names) print_out("{}: removed\n", name);
  if (remains.pools.empty() && remains.names.empty() && !remains.failed) {
    print_out("{}\n", only_looks ? "no host pool is kept by anybody" : "nothing was left behind");
  }
}

}  // namespace

int gc_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  bool only_looks = false;
  bool as_json = false;
  std::chrono::milliseconds deadline{10'000};
  auto app = make_app(
      "gc",
      "Removes what processes that were killed have left behind, and nobody wants: host pools that "
      "movers keep for a next manager, while there is none, and names in the runtime directory, "
      "the "
      "whole folder of an instance that nobody is in any more. Of all instances, unless one is "
      "named, which has to be there. What a living process uses is left alone.",
      "example: what is there, then all of it removed\n"
      "  kvferry gc --list\n"
      "  kvferry gc",
      common);
  app->add_flag("--list", only_looks, "Shows which host pools there are, and removes nothing");
  app->add_flag("--json", as_json, "Prints JSON");
  add_milliseconds(*app, "--deadline", deadline, "How long the keepers of an instance may take");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry gc", common.log_level);
  std::vector<std::string> instances;
  const bool is_named = app->count("--instance") > 0;
  if (is_named) {
    instances.push_back(common.instance);
  } else {
    auto found = ipc::RuntimeDir::instances(common.runtime_dir);
    if (!found) {
      print_err("kvferry gc: {}\n", found.error().to_string());
      return kExitFailed;
    }
    instances = std::move(found).value();
  }
  Remains remains;
  for (const std::string& instance : instances) {
    const auto dir = ipc::RuntimeDir::find(common.runtime_dir, instance);
    if (dir) {
      collect(*dir, only_looks, deadline, remains);
      if (!only_looks) remove_folder(*dir, remains);
    } else if (is_named || dir.error().code != ipc::ErrorCode::kNotFound) {
      remains.failed = true;
      print_err("kvferry gc: instance {}: {}\n", instance, dir.error().to_string());
    }
  }
  if (as_json) {
    print_json(remains);
  } else {
    print_text(remains, only_looks);
  }
  return remains.failed ? kExitFailed : kExitDone;
}

}  // namespace kvferry::cli
