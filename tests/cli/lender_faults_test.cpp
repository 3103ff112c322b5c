// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Lenders of weights that lie, and deaths while weights are lent: real workers, and real memory of
// their device. What WeightsImport refuses is in weights_import_test.
#include "cli/update_sources_fixture.hpp"
#include "kvferry/worker/weights_exporter.hpp"
#include "kvferry/worker/weights_import.hpp"
#include "support/processor_time.hpp"
#include "support/scripted_lender.hpp"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>

namespace kvferry::test {
namespace {

namespace fs = std::filesystem;
using ipc::Deadline;
using ipc::ErrorCode;
using ipc::LoanPart;
using ipc::LoanRequest;
using ipc::LoanStep;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::HasSubstr;

ipc::HandleKind kind_of(const std::string& name) {
  return name == "vmm" ? ipc::HandleKind::kVmm : ipc::HandleKind::kLegacy;
}

class LyingLenderTest : public UpdateSourcesTest {
 protected:
  /// What `kvferry export-weights` says of the second file, over memory of the workers' device.
  [[nodiscard]] static LoanPart honest(std::uint64_t size_bytes) {
    LoanPart part;
    part.total_allocations = 1;
    part.total_tensors = 3;
    part.allocations.push_back({ipc::HandleKind::kVmm, size_bytes, {}, true});
    part.tensors.push_back({"w", "BF16", {64, 32}, 0, 0, 4096});
    part.tensors.push_back({"n", "F32", {5}, 0, 4096, 20});
    part.tensors.push_back({"none", "U8", {0}, 0, 0, 0});
    return part;
  }
};

TEST_F(LyingLenderTest, IsNamedAndChangesNothing) {
  ASSERT_NO_FATAL_FAILURE(
      start_engine(2, {"--weights=" + first_, std::string("--weights-id=") + kFirstId}));
  const auto prompt = prompt_of(5, 30);
  const GenerateReply before = generate(prompt, 20);
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  const auto owner = ipc::open_device(ipc::DeviceSpec::parse(device()).value());
  auto memory = owner->allocate(1, ipc::HandleKind::kVmm, nullptr).value();
  const LoanPart truth = honest(memory->size_bytes());
  const std::uint64_t held = device_bytes();

  // Both ranks ask, one after the other or at the same time.
  const auto refused = [&](const char* lie, ScriptedLender::Script script, const char* why,
                           const char* deadline = "--deadline=20s") {
    SCOPED_TRACE(lie);
    ScriptedLender lender(*dir_->weights_socket("trainer"), std::move(script));
    const Finished done = update("ipc", {deadline, "--empty-cache"});
    EXPECT_EQ(done.exit, ChildExit::exited(1));
    EXPECT_THAT(done.complaints, HasSubstr(fmt::format("exporter 'trainer' (pid {})", getpid())));
    EXPECT_THAT(done.complaints, HasSubstr(why));
    EXPECT_EQ(identity(), kFirstId);
  };
  const auto says = [&](const std::function<void(LoanPart&)>& tell, bool answers_return = true) {
    return [&, tell, answers_return](const LoanRequest& request) {
      std::vector<LenderPacket> answer;
      if (request.step == LoanStep::kReturn) {
        if (answers_return) answer.push_back({ipc::encode(LoanPart{})});
        return answer;
      }
      LoanPart part = truth;
      tell(part);
      answer.push_back({ipc::encode(part)});
      answer.back().fds.push_back(std::move(memory->export_handle().value().fd));
      return answer;
    };
  };
  refused("another name", says([](LoanPart& part) { part.tensors[1].name = "m"; }),
          "its tensor number 1 is 'm' F32 [5], the model in use has 'n' F32 [5]");
  refused("another order",
          says([](LoanPart& part) { std::swap(part.tensors[0], part.tensors[1]); }),
          "its tensor number 0 is 'n' F32 [5]");
  refused("fewer tensors", says([](LoanPart& part) {
            part.tensors.pop_back();
            part.total_tensors = 2;
          }),
          "its tensor number 2 is none");
  refused("no tensors", says([](LoanPart& part) {
            part.tensors.clear();
            part.total_tensors = 0;
          }),
          "lends no tensor");
  refused("more than it says",
          says([](LoanPart& part) { part.tensors.push_back(part.tensors[2]); }), "do not follow");
  refused("more memory than there is",
          says([](LoanPart& part) { part.allocations[0].size_bytes *= 2; }),
          "its memory cannot be mapped");
  refused("behind the memory", says([](LoanPart& part) { part.tensors[0].offset = 1ULL << 40U; }),
          "of allocation 0");
  refused("a refusal in the manager's name",
          says([](LoanPart& part) { part.refused = KVFERRY_ERROR(kNoManager, "there is none"); }),
          "it refuses as no_manager: there is none");
  refused(
      "garbage",
      [](const LoanRequest& /*request*/) {
        std::vector<LenderPacket> answer;
        answer.push_back({std::vector<std::uint8_t>(100, 0xc1)});
        return answer;
      },
      "protocol");
  refused(
      "silence", [](const LoanRequest& /*request*/) { return std::vector<LenderPacket>(); },
      "did not answer by the deadline", "--deadline=2s");
  refused("silence at the return", says([](LoanPart& /*part*/) {}, false),
          "did not answer by the deadline", "--deadline=2s");

  EXPECT_LE(device_bytes(), held) << "something of it stays mapped or prepared";
  ASSERT_EQ(ask("continue").exit, ChildExit::exited(0));
  EXPECT_EQ(generate(prompt, 20).tokens, before.tokens);
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  lend(second_, "trainer");
  const Finished updated = update("ipc");
  EXPECT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
}

using LenderDescriptorsTest = UpdateSourcesTest;

// Its connections wait, and it does not try again and again.
TEST_F(LenderDescriptorsTest, WithoutAnyItWaitsAndGoesOnWhenItHasSome) {
  ChildProcess& lender = lend(second_, "trainer");
  rlimit before{};
  ASSERT_EQ(::prlimit(lender.pid(), RLIMIT_NOFILE, nullptr, &before), 0);
  const rlimit none{3, before.rlim_max};
  ASSERT_EQ(::prlimit(lender.pid(), RLIMIT_NOFILE, &none, nullptr), 0);
  auto waiting = ipc::PacketSocket::connect(temp_ / "run/chat/trainer.weights", soon());
  ASSERT_TRUE(waiting) << waiting.error().to_string();
  ASSERT_TRUE(waiting->send(ipc::encode(LoanRequest{})));
  const Deadline by = soon();
  do {
    const auto used = processor_time(lender.pid());
    ASSERT_FALSE(lender.wait_zombie(Deadline::after(800ms)));
    EXPECT_LT(processor_time(lender.pid()) - used, 400ms) << "it tries again and again";
  } while (lender.stderr_text().find("Too many open files") == std::string::npos && !by.expired());
  EXPECT_THAT(lender.stderr_text(), HasSubstr("Too many open files"));
  ASSERT_EQ(::prlimit(lender.pid(), RLIMIT_NOFILE, &before, nullptr), 0);
  const auto answer = waiting->receive(soon());
  ASSERT_TRUE(answer) << answer.error().to_string();
  EXPECT_EQ(ipc::decode<LoanPart>(answer->bytes, "LoanPart").value().total_tensors, 3U);
}

/// The next descriptor that it opens.
int lowest_free_descriptor(pid_t pid) {
  int fd = 0;
  while (fs::exists(fs::symlink_status(fmt::format("/proc/{}/fd/{}", pid, fd)))) ++fd;
  return fd;
}

// With the last one the connection is accepted: what watches for the borrower's death needs
// another.
TEST_F(LenderDescriptorsTest, WithASingleOneABorrowerIsToldAndMayComeAgain) {
  ChildProcess& lender = lend(second_, "trainer");
  rlimit before{};
  ASSERT_EQ(::prlimit(lender.pid(), RLIMIT_NOFILE, nullptr, &before), 0);
  const auto most = static_cast<rlim_t>(lowest_free_descriptor(lender.pid()) + 1);
  const rlimit one{most, before.rlim_max};
  ASSERT_EQ(::prlimit(lender.pid(), RLIMIT_NOFILE, &one, nullptr), 0);
  const fs::path socket = temp_ / "run/chat/trainer.weights";
  const std::atomic<bool> cancelled{false};
  for (int i = 0; i < 20; ++i) {
    const auto refused = worker::WeightsImport::open(socket, soon(), cancelled);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kNotReady) << refused.error().message;
    EXPECT_THAT(refused.error().message, HasSubstr("it takes no borrower now: "));
    EXPECT_THAT(refused.error().message, HasSubstr("Too many open files"));
  }
  EXPECT_THAT(lender.stderr_text(),
              HasSubstr(fmt::format("borrower pid {} is refused", ::getpid())));
  ASSERT_EQ(::prlimit(lender.pid(), RLIMIT_NOFILE, &before, nullptr), 0);
  const auto import = worker::WeightsImport::open(socket, soon(), cancelled);
  ASSERT_TRUE(import) << import.error().to_string();
  EXPECT_EQ(import->tensors().size(), 3U);
}

/// Weights that take their time to copy, and a worker that is stopped while it has them mapped.
class HeldLoanTest : public UpdateSourcesTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    device_size_ = "512MiB";
    for (int i = 0; i < 6; ++i) model_.push_back({fmt::format("w{}", i), "BF16", {4096, 1024}});
    write_safetensors(first_, model_, 1);
    write_safetensors(second_, model_, 2);
    ASSERT_NO_FATAL_FAILURE(
        start_engine(2, {"--weights=" + first_, std::string("--weights-id=") + kFirstId}));
    before_ = generate(prompt_, 20);
    ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
    // Both have had a load's transient memory: from here on, what is more is of the lender's.
    ASSERT_EQ(update("disk", {"--empty-cache"}).exit, ChildExit::exited(0));
    back_to_first();
    held_ = device_bytes();
  }
  void TearDown() override {
    if (running_.size() > 2) worker().signal(SIGCONT);
  }
  [[nodiscard]] ChildProcess& worker() const { return *running_[2]; }  ///< Of rank 0.
  void back_to_first() {
    ASSERT_EQ(ask("update-weights",
                  {"--file=" + first_, "--empty-cache", std::string("--weights-id=") + kFirstId})
                  .exit,
              ChildExit::exited(0));
  }
  /// The largest memory that a process shares: what it lends.
  static std::uint64_t lent_by(pid_t pid) {
    std::uint64_t inode = 0;
    off_t largest = 0;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(fmt::format("/proc/{}/fd", pid), error)) {
      struct stat info {};
      const std::string target = fs::read_symlink(entry.path(), error);
      if (!target.starts_with("/memfd:kvferry") || ::stat(entry.path().c_str(), &info) != 0) {
        continue;
      }
      if (info.st_size <= largest) continue;
      largest = info.st_size;
      inode = info.st_ino;
    }
    return inode;
  }
  [[nodiscard]] bool worker_maps(std::uint64_t inode) const {
    std::ifstream maps(fmt::format("/proc/{}/maps", worker().pid()));
    const std::string column = fmt::format(" {} ", inode);
    for (std::string line; std::getline(maps, line);) {
      if (line.find(column) != std::string::npos) return true;
    }
    return false;
  }
  /// An update from the lender that runs, with rank 0 stopped where it has the lender's memory
  /// mapped. One that was too fast is undone, and comes again.
  std::optional<ChildProcess> update_held_in_the_middle(pid_t lender) {
    const std::uint64_t inode = lent_by(lender);
    EXPECT_NE(inode, 0U);
    const Deadline deadline = Deadline::after(60s);  // Of several updates, on a busy machine.
    while (!deadline.expired()) {
      std::vector<std::string> arguments = common("update-weights");
      arguments.insert(arguments.end(), {"--from=ipc", "--source=trainer", "--empty-cache"});
      ChildProcess asks(ChildOptions{.program = KVFERRY_PROGRAM, .arguments = arguments});
      while (!asks.wait(Deadline::after(0ms))) {
        if (!worker_maps(inode)) continue;
        EXPECT_TRUE(worker().stop());
        if (worker_maps(inode)) return asks;
        worker().signal(SIGCONT);
      }
      EXPECT_EQ(asks.wait(soon()), ChildExit::exited(0)) << asks.stderr_text();
      back_to_first();
    }
    ADD_FAILURE() << "no update was met in its middle";
    return std::nullopt;
  }
  void expect_first_weights() {
    EXPECT_EQ(identity(), kFirstId);
    ASSERT_EQ(ask("continue").exit, ChildExit::exited(0));
    EXPECT_EQ(generate(prompt_, 20).tokens, before_.tokens);
  }

  std::vector<WrittenTensor> model_;
  const std::vector<std::uint32_t> prompt_ = prompt_of(5, 30);
  GenerateReply before_;
  std::uint64_t held_ = 0;  ///< Of the device, without a lender.
};

TEST_P(HeldLoanTest, ALenderThatIsKilledDuringTheCopiesIsNamedAndItsMemoryIsBack) {
  ChildProcess& lender = lend(second_, "trainer", {std::string("--handles=") + GetParam()});
  auto asks = update_held_in_the_middle(lender.pid());
  ASSERT_TRUE(asks);
  lender.kill();
  EXPECT_EQ(lender.wait(soon()), ChildExit::killed_by(SIGKILL));
  worker().signal(SIGCONT);
  EXPECT_EQ(asks->wait(soon()), ChildExit::exited(1));
  EXPECT_THAT(asks->stderr_text(),
              HasSubstr(fmt::format("exporter 'trainer' (pid {}) died", lender.pid())));
  ASSERT_NO_FATAL_FAILURE(expect_first_weights());
  EXPECT_LE(device_bytes(), held_);
  // Its name is free, and what its successor lends is taken.
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  lend(second_, "trainer", {std::string("--handles=") + GetParam()});
  const Finished updated = update("ipc");
  EXPECT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
}

TEST_P(HeldLoanTest, ALenderThatIsToldToEndNamesWhoHoldsItsWeights) {
  ChildProcess& lender =
      lend(second_, "trainer", {std::string("--handles=") + GetParam(), "--deadline=200ms"});
  auto asks = update_held_in_the_middle(lender.pid());
  ASSERT_TRUE(asks);
  lender.signal(SIGTERM);
  EXPECT_EQ(lender.wait(soon()), ChildExit::exited(1));
  EXPECT_THAT(lender.stderr_text(), HasSubstr("timeout: processes "));
  EXPECT_THAT(lender.stderr_text(), HasSubstr(std::to_string(worker().pid())));
  EXPECT_GT(device_bytes(), held_) << "the worker has it mapped";
  worker().signal(SIGCONT);
  EXPECT_EQ(asks->wait(soon()), ChildExit::exited(1));
  ASSERT_NO_FATAL_FAILURE(expect_first_weights());
  EXPECT_LE(device_bytes(), held_);
}

TEST_P(HeldLoanTest, CloseWaitsForABorrowerThatLivesAndTakesItsDeathForAnAnswer) {
  const auto owner = ipc::open_device(ipc::DeviceSpec::parse(device()).value());
  constexpr std::uint64_t kTensorBytes = 4096ULL * 1024 * 2;
  auto memory = owner->allocate(model_.size() * kTensorBytes, kind_of(GetParam()), nullptr).value();
  std::vector<worker::ExportedTensor> tensors;
  for (const WrittenTensor& tensor : model_) {
    tensors.push_back({tensor.name, tensor.dtype, tensor.shape,
                       memory->address() + tensors.size() * kTensorBytes});
  }
  auto exporter =
      worker::WeightsExporter::start(*owner, {(temp_ / "run").string(), "chat", "trainer"}, tensors)
          .value();
  auto asks = update_held_in_the_middle(::getpid());
  ASSERT_TRUE(asks);
  EXPECT_GE(exporter->borrowers(), 1U);

  const ipc::Status early = exporter->close(Deadline::after(100ms));
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(early.error().message, HasSubstr(std::to_string(worker().pid())));
  EXPECT_GE(exporter->borrowers(), 1U);
  EXPECT_GE(device_bytes(), held_ + memory->size_bytes()) << "it is the lender's to free";

  worker().kill();
  EXPECT_EQ(worker().wait(soon()), ChildExit::killed_by(SIGKILL));
  const ipc::Status closed = exporter->close(soon());
  ASSERT_TRUE(closed) << closed.error().to_string();
  EXPECT_EQ(exporter->borrowers(), 0U);
  ASSERT_TRUE(memory->release()) << "with legacy memory that somebody maps this aborts";
  memory.reset();
  EXPECT_EQ(asks->wait(soon()), ChildExit::exited(1));
  EXPECT_THAT(asks->stderr_text(), HasSubstr("rank 0"));
  EXPECT_LE(device_bytes(), held_);
}

INSTANTIATE_TEST_SUITE_P(By,
                         HeldLoanTest,
                         testing::Values("vmm", "legacy"),
                         [](const auto& handles) { return std::string(handles.param); });

}  // namespace
}  // namespace kvferry::test
