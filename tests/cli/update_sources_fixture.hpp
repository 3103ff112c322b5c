// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cli/serve_fixture.hpp"
#include "support/safetensors_writer.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace kvferry::test {

inline constexpr const char* kFirstId = "0123456789abcdef0123456789abcdef";

/// An engine of reference workers, two files of weights for it, and processes that lend them.
class UpdateSourcesTest : public ServeTest {
 protected:
  void SetUp() override {
    write(first_, 1);
    write(second_, 2);
  }
  static void write(const std::string& file, std::uint64_t seed) {
    write_safetensors(file, {{"w", "BF16", {64, 32}}, {"n", "F32", {5}}, {"none", "U8", {0}}},
                      seed);
  }
  /// Where broadcasts reach the ranks, each has a device of its own.
  void prepare_for(const std::string& from) { own_devices_ = from == "broadcast"; }
  /// Lends a file on the workers' device; says so before this returns.
  ChildProcess& lend(const std::string& file,
                     const std::string& name,
                     const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = common("export-weights");
    for (const auto& option : {"--file=" + file, "--name=" + name, "--device=" + device()}) {
      arguments.push_back(option);
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    lenders_.push_back(std::make_unique<ChildProcess>(
        ChildOptions{.program = KVFERRY_PROGRAM, .arguments = arguments}));
    EXPECT_TRUE(lenders_.back()->wait_line("lends " + file + " as " + name, soon()))
        << lenders_.back()->stderr_text();
    return *lenders_.back();
  }
  [[nodiscard]] Finished update(const std::string& from,
                                const std::vector<std::string>& more = {}) {
    std::vector<std::string> options{"--from=" + (from == "broadcast" ? "distributed" : from)};
    options.push_back(from == "ipc" ? "--source=trainer" : "--file=" + second_);
    options.insert(options.end(), more.begin(), more.end());
    return ask("update-weights", options);
  }
  [[nodiscard]] std::string identity() const {
    return nlohmann::json::parse(ask("status", {"--json"}).output)["engines"][0]["weights"];
  }
  [[nodiscard]] std::uint64_t device_bytes() const {
    return ipc::host_device_used_bytes(device_name_).value();
  }
  static std::uint64_t empties_of(const ipc::WorkerMemory& memory) {
    return std::accumulate(memory.empties.begin(), memory.empties.end(), std::uint64_t{0});
  }

  const std::string first_ = (temp_ / "first").string();
  const std::string second_ = (temp_ / "second").string();
  std::vector<std::unique_ptr<ChildProcess>> lenders_;
};

}  // namespace kvferry::test
