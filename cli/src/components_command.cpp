// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/wire/component_messages.hpp"
#include "operator_link.hpp"
#include "options.hpp"
#include "print.hpp"
#include "table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// components: what workers have on the device beside the cache, and the release of it.
namespace kvferry::cli {
namespace {

ipc::Result<ipc::ComponentNames> parse_names(std::string_view text) {
  ipc::ComponentNames names;
  if (text == "all") {
    names.all = true;
    return names;
  }
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    names.names.emplace_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  KVFERRY_TRY(names.check());
  return names;
}

std::string allocator_of(const ipc::ComponentOutcome& component) {
  if (component.error) return "failed";
  if (!component.released) return "-";
  if (!component.outcome.emptied) return "not emptied";
  return fmt::format("emptied: {} -> {}", ipc::format_size(component.outcome.reserved_before),
                     ipc::format_size(component.outcome.reserved_after));
}

void print_components(const ipc::ComponentsReply& reply, bool releases) {
  std::vector<Table::Column> columns{{"rank", Align::kRight},
                                     {"component"},
                                     {"strategy"},
                                     {"large"},
                                     {"on device", Align::kRight}};
  if (releases) {
    columns.insert(columns.end(), {{"before", Align::kRight}, {"allocator"}});
  }
  Table table(columns);
  for (const ipc::RankComponentsOutcome& rank : reply.ranks) {
    for (const ipc::ComponentOutcome& component : rank.reply.components) {
      const ipc::ComponentState& state = component.outcome.component;
      std::vector<std::string> row{
          std::to_string(rank.rank.value), state.name, std::string(to_string(state.strategy)),
          state.memory_intensive ? "yes" : "no", ipc::format_size(state.device_bytes)};
      if (releases) {
        row.push_back(ipc::format_size(component.outcome.device_bytes_before));
        row.push_back(allocator_of(component));
      }
      table.add(std::move(row));
    }
  }
  if (!table.empty()) (void)write_out(table.render());
}

/// Names what failed, and why, on stderr.
void report_failures(const ipc::ComponentsReply& reply) {
  for (const ipc::RankComponentsOutcome& rank : reply.ranks) {
    if (rank.error) {
      print_err("kvferry components: rank {}: {}\n", rank.rank.value, rank.error->to_string());
    }
    for (const ipc::ComponentOutcome& component : rank.reply.components) {
      if (!component.error) continue;
      print_err("kvferry components: rank {}: {}: {}\n", rank.rank.value,
                component.outcome.component.name, component.error->to_string());
    }
  }
}

}  // namespace

int components_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kError;
  ipc::ComponentsRequest request;
  auto app = make_app(
      "components",
      "Shows what the workers of an engine have on the device beside the cache, and how: resident "
      "stays; offloaded is given up as a whole between two uses, layerwise layer by layer. With "
      "--release components end their use now; requests go on, and the next use takes the memory "
      "again. The allocator is emptied after the release of a large one whose memory is gone, or "
      "that is offloaded layer by layer; else it keeps what it caches.",
      "example: what is there, and the decode graph's buffers given up\n"
      "  kvferry components\n"
      "  kvferry components --release decode_graph",
      common);
  add_parsed<ipc::ComponentNames>(*app, "--release", request.release, parse_names,
                                  "What to release: names, or all [nothing]")
      ->type_name("NAME,...");
  app->add_option("--engine", request.engine, "Which engine [the only one]")->type_name("NAME");
  add_milliseconds(*app, "--deadline", request.deadline, "How long it may take");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry components", common.log_level);
  const auto outcome = ask_outcome<ipc::ComponentsReply>(common, ipc::MessageKind::kComponents,
                                                         request, request.deadline);
  const bool releases = !request.release.only_looks();
  return end_command(
      "components", outcome,
      [releases](const ipc::ComponentsReply& reply) { print_components(reply, releases); },
      report_failures, [](const ipc::ComponentsReply& /*reply*/) { return kExitDone; });
}

}  // namespace kvferry::cli
