// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/replay_fixture.hpp"

#include "kvferry/ipc/wire/control.hpp"

#include <poll.h>
#include <stdlib.h>

#include <fstream>
#include <sstream>

namespace kvferry::test {
namespace {

namespace fs = std::filesystem;
using std::chrono_literals::operator""s;

constexpr int kLookAgainMs = 10;

std::string read_file(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

Finished run_kvferry(const std::vector<std::string>& arguments) {
  ChildProcess child({.program = KVFERRY_PROGRAM, .arguments = arguments});
  child.close_stdin();
  Finished finished;
  const ipc::Deadline deadline = ipc::Deadline::after(90s);
  while (auto line = child.read_line(deadline)) finished.output += *line + "\n";
  finished.exit = child.wait(deadline);
  finished.complaints = child.stderr_text();
  return finished;
}

ReplayTest::ReplayTest() {
  std::string name = (fs::temp_directory_path() / "kvferry-replay-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "no temporary folder";
  folder_ = name;
}

ReplayTest::~ReplayTest() {
  running_.reset();
  std::error_code error;
  fs::remove_all(folder_, error);
}

std::string ReplayTest::write_trace(int requests, int sessions, int gap_ms) {
  const std::string file = path("trace.jsonl");
  std::ofstream out(file);
  for (int i = 0; i < requests; ++i) {
    const int session = i % sessions;
    const int blocks = 6 + 2 * (i / sessions % 8);
    nlohmann::json ids = {0};
    for (int b = 1; b < blocks; ++b) ids.push_back(1000 * (session + 1) + b);
    out << nlohmann::json{{"timestamp", i * gap_ms},
                          {"input_length", blocks * 512},
                          {"output_length", 600},
                          {"hash_ids", ids}}
               .dump()
        << '\n';
  }
  return file;
}

nlohmann::json ReplayTest::report() const {
  return nlohmann::json::parse(read_file(folder_ / "report.json"), nullptr, false);
}

std::vector<std::string> ReplayTest::replay_arguments(const std::string& trace,
                                                      const std::vector<std::string>& more) const {
  std::vector<std::string> arguments = {"replay",
                                        "--device=host",
                                        "--trace=" + trace,
                                        "--runtime-dir=" + path("run"),
                                        "--ranks=2",
                                        "--verify=full",
                                        "--gpu-blocks=120",
                                        "--in-flight=4",
                                        "--report=" + path("report.json")};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

Finished ReplayTest::replay(const std::string& trace, const std::vector<std::string>& more) {
  return run_kvferry(replay_arguments(trace, more));
}

void ReplayTest::start_replay(const std::string& trace, const std::vector<std::string>& more) {
  running_.emplace(
      ChildOptions{.program = KVFERRY_PROGRAM, .arguments = replay_arguments(trace, more)});
  const bool flowing = wait_until([this] {
    const nlohmann::json now = status();
    return now.is_object() && now["engines"].size() == 1 &&
           now["engines"][0]["jobs"]["done"].get<int>() >= 5;
  });
  ASSERT_TRUE(flowing) << running_->stderr_text();
}

std::optional<ChildExit> ReplayTest::finish_replay(std::chrono::seconds limit) {
  const auto exit = running_->wait(ipc::Deadline::after(limit));
  EXPECT_TRUE(exit.has_value()) << "still running after " << limit.count() << " s:\n"
                                << running_->stderr_text();
  return exit;
}

std::vector<std::string> ReplayTest::instance_options() const {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_ / "run", error)) {
    return {"--runtime-dir=" + entry.path().string(), "--instance=replay"};
  }
  return {"--runtime-dir=" + path("run"), "--instance=replay"};
}

nlohmann::json ReplayTest::status(const std::string& instance) const {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_ / "run", error)) {
    const ipc::Deadline deadline = ipc::Deadline::after(20s);
    ipc::ControlLink::Options options;
    options.registry_path = entry.path() / instance / "registry";
    options.control_path = entry.path() / instance / "control";
    options.incarnation = ipc::IncarnationId::random();
    options.name = "test";
    const auto link = ipc::ControlLink::connect(options, deadline);
    if (!link) continue;
    const auto reply =
        (*link)->call<ipc::StatusReply>(ipc::MessageKind::kStatus, ipc::Empty{}, deadline);
    if (reply) return nlohmann::json::parse(reply->json, nullptr, false);
  }
  return {};
}

std::map<std::string, ipc::ProcessRef> ReplayTest::children() const {
  std::map<std::string, ipc::ProcessRef> found;
  const std::string pid = std::to_string(running_->pid());
  std::istringstream pids(read_file(fs::path("/proc") / pid / "task" / pid / "children"));
  for (pid_t child = 0; pids >> child;) {
    std::string name;
    std::string rank;
    std::istringstream arguments(read_file(fs::path("/proc") / std::to_string(child) / "cmdline"));
    std::string argument;
    for (int i = 0; std::getline(arguments, argument, '\0'); ++i) {
      if (i == 1) name = argument;
      for (const std::string option : {"--rank=", "--name="}) {
        if (argument.starts_with(option)) rank = "/" + argument.substr(option.size());
      }
    }
    auto process = ipc::ProcessRef::of_pid(child);
    if (process) found.emplace(name + rank, std::move(*process));
  }
  return found;
}

bool ReplayTest::wait_until(const std::function<bool()>& condition) {
  const ipc::Deadline deadline = ipc::Deadline::after(60s);
  while (!deadline.expired()) {
    if (condition()) return true;
    pollfd end{running_->pidfd(), POLLIN, 0};
    if (poll(&end, 1, kLookAgainMs) != 0) return false;
  }
  return false;
}

}  // namespace kvferry::test
