// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/copier/copier.hpp"
#include "command.hpp"
#include "daemon.hpp"
#include "options.hpp"
#include "rank_options.hpp"

#include <string>
#include <utility>

namespace kvferry::cli {

int bench_copier_command(const Arguments& arguments) {
  RankOptions options;
  CopierConfig config;
  auto app = make_app("bench-copier",
                      "Runs a worker that copies by itself, for kvferry bench ablation, which "
                      "starts it: it serves nobody else.",
                      "", options.common);
  add_rank_options(*app, options);
  app->add_option("--socket", config.socket, "Where the benchmark listens")->required()->group("");
  LoadOptions load;
  add_load_options(*app, load);
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  auto rank = make_rank_config(options);
  if (!rank) return usage_error(*app, rank.error());
  config.rank = std::move(*rank);
  config.load = load.config();
  return run_daemon("copier", options.common.log_level, options.parent_fd,
                    [&] { run_copier(config); });
}

}  // namespace kvferry::cli
