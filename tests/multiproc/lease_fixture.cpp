// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/lease_fixture.hpp"

#include "kvferry/ipc/device/device.hpp"
#include "support/host_memory.hpp"
#include "support/instance_checks.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <sstream>

namespace kvferry::test {

LeasePeer::LeasePeer(const std::vector<std::string>& arguments,
                     const std::string& program,
                     const std::vector<std::string>& environment)
    : process_({.program = sibling_program(program),
                .arguments = arguments,
                .environment = environment}) {}

void LeasePeer::tell(const std::string& command) {
  EXPECT_TRUE(process_.write_line(command)) << command << "\n" << process_.stderr_text();
}

void LeasePeer::remember(const std::string& line) {
  std::istringstream in(line);
  std::string verb;
  std::string mapped;
  std::string connected;
  in >> verb >> view_.phase >> view_.epoch >> connected >> mapped >> view_.prepared_by >>
      view_.leases >> view_.quarantined >> view_.refused >> view_.peer_refused;
  view_.connected = connected == "connected";
  view_.mapped = mapped == "mapped";
  std::getline(in >> std::ws, view_.note);
}

std::string LeasePeer::expect(const std::string& prefix) {
  const ipc::Deadline deadline = soon();
  while (const auto line = process_.read_line(deadline)) {
    if (line->starts_with("view ")) remember(*line);
    if (line->starts_with(prefix)) return *line;
  }
  ADD_FAILURE() << "no line \"" << prefix << "\" of pid " << process_.pid() << "\n"
                << process_.stderr_text();
  return {};
}

std::string LeasePeer::ask(const std::string& command, const std::string& prefix) {
  tell(command);
  return expect(prefix);
}

SeenView LeasePeer::expect_view(const char* what,
                                const std::function<bool(const SeenView&)>& wanted) {
  const ipc::Deadline deadline = soon();
  while (!wanted(view_)) {
    const auto line = process_.read_line(deadline);
    if (!line) {
      ADD_FAILURE() << "never " << what << "; last: " << view_.phase << " " << view_.epoch << " "
                    << view_.note << "\n"
                    << process_.stderr_text();
      break;
    }
    if (line->starts_with("view ")) remember(*line);
  }
  return view_;
}

void LeasePeer::expect_mapped(std::uint64_t epoch) {
  (void)expect_view(fmt::format("mapped at epoch {}", epoch).c_str(), [epoch](const SeenView& v) {
    return v.mapped && v.epoch == epoch && v.phase == "ready";
  });
}

void LeasePeer::kill_and_reap() {
  process_.kill();
  EXPECT_EQ(process_.wait(soon()), ChildExit::killed_by(SIGKILL));
}

void LeasePeer::stop() { ASSERT_TRUE(process_.stop()); }

void LeasePeer::quit() {
  tell("quit");
  EXPECT_EQ(process_.wait(soon()), ChildExit::exited(0)) << process_.stderr_text();
}

LeaseFixture::LeaseFixture() {
  static std::atomic<int> count{0};
  device_name_ = fmt::format("lease-{}-{}", ::getpid(), ++count);
}

void LeaseFixture::TearDown() {
  EXPECT_EQ(used_bytes_after_death(), 0U) << "device memory was leaked";
  EXPECT_EQ(names(), std::vector<std::string>{}) << "names were left behind";
  if (!instance_) return;
  expect_allowed_transitions();
  instance_.reset();
  EXPECT_FALSE(std::filesystem::exists(dir_.path() / "test")) << "the last one to leave removes it";
}

void LeaseFixture::expect_allowed_transitions() {
  for (const std::string& breach : find_breaches(*instance_)) ADD_FAILURE() << breach;
}

std::vector<std::string> LeaseFixture::names() const { return names_below(dir_.path()); }

std::uint64_t LeaseFixture::used_bytes() const {
  const auto used = ipc::host_device_used_bytes(device_name_);
  EXPECT_TRUE(used.has_value());
  return used.value_or(UINT64_MAX);
}

std::uint64_t LeaseFixture::used_bytes_after_death() const {
  return host_bytes_after_death(device_name_, 0);
}

std::unique_ptr<LeasePeer> LeaseFixture::start(const std::string& self, Arguments extra) {
  return std::make_unique<LeasePeer>(peer_arguments(self, std::move(extra)));
}

std::vector<std::string> LeaseFixture::peer_arguments(const std::string& self, Arguments extra) {
  if (!instance_) {
    auto instance = ipc::RuntimeDir::open(dir_.path().native(), "test");
    EXPECT_TRUE(instance.has_value()) << instance.error().to_string();
    if (instance) instance_.emplace(*std::move(instance));
  }
  Arguments all{{"self", self},
                {"owner", owner_},
                {"handles", handles_},
                {"dir", dir_.path().native()},
                {"device", fmt::format("host:{}:{}MiB", device_name_, capacity_mib_)}};
  // Never merge the other way round: what a test says of one peer counts most.
  extra.merge(Arguments(common_));
  extra.merge(all);
  std::vector<std::string> arguments;
  for (const auto& [name, value] : extra) arguments.push_back(name + "=" + value);
  return arguments;
}

std::unique_ptr<LeasePeer> LeaseFixture::start_owner(Arguments extra) {
  auto peer = start(owner_, std::move(extra));
  (void)peer->expect("up");
  return peer;
}

std::unique_ptr<LeasePeer> LeaseFixture::start_attacher(Arguments extra) {
  auto peer = start(other_kind(), std::move(extra));
  (void)peer->expect("up");
  return peer;
}

}  // namespace kvferry::test
