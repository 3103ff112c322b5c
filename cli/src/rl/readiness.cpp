// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/readiness.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace kvferry::cli {
namespace {

using Json = nlohmann::json;

/// The member, or null: a status of another kind is one that lacks everything.
Json part(const Json& object, const char* name) {
  return object.is_object() && object.contains(name) ? object[name] : Json();
}

Json find_engine(const Json& status, std::string_view name) {
  for (const Json& engine : part(status, "engines")) {
    if (part(engine, "name") == name) return engine;
  }
  return {};
}

}  // namespace

std::vector<std::string> missing_from(std::string_view status,
                                      std::string_view engine,
                                      std::uint32_t ranks,
                                      const ipc::Digest& weights) {
  const Json known = find_engine(Json::parse(status, nullptr, false), engine);
  if (known.is_null()) return {fmt::format("engine {} at the manager", engine)};
  std::vector<std::string> missing;
  const Json seen = part(known, "ranks");
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    const Json processes = rank < seen.size() ? seen[rank] : Json();
    for (const char* kind : {"worker", "mover"}) {
      const Json process = part(processes, kind);
      if (!process.is_object()) {
        missing.push_back(fmt::format("the {} of rank {}", kind, rank));
      } else if (part(process, "mapped") != true) {
        missing.push_back(fmt::format("the cache at the {} of rank {}", kind, rank));
      }
    }
  }
  if (!missing.empty()) return missing;
  if (part(known, "offload_ready") != true) missing.emplace_back("offload of all ranks");
  if (part(known, "weights") != weights.hex()) {
    missing.push_back(fmt::format("weights {} on all ranks", weights.hex()));
  }
  return missing;
}

}  // namespace kvferry::cli
