// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Lenders that lie: each is named in a typed error, and nothing of theirs stays.
#include "kvferry/worker/weights_import.hpp"

#include "ipc/os/temp_dir.hpp"
#include "support/descriptors.hpp"
#include "support/scripted_lender.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <limits>
#include <optional>
#include <string>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::ErrorCode;
using ipc::LoanPart;
using ipc::LoanRequest;
using ipc::LoanStep;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::LenderPacket;
using test::ScriptedLender;
using testing::HasSubstr;

constexpr std::uint64_t kAllocationBytes = 2ULL << 20;
constexpr std::uint64_t kTensorBytes = 4096;

/// Not that of other tests: a name is a device for all processes of the machine.
std::string device_name() { return fmt::format("import-{}", ::getpid()); }

std::unique_ptr<ipc::Device> open_host(const std::string& name) {
  ipc::DeviceSpec spec;
  spec.host_name = name;
  spec.host_capacity_bytes = 64ULL << 20;
  return ipc::open_device(spec);
}

std::uint64_t used_bytes() { return ipc::host_device_used_bytes(device_name()).value(); }

class WeightsImportTest : public testing::Test {
 protected:
  /// What an honest lender says: one tensor in one allocation.
  static LoanPart honest() {
    LoanPart part;
    part.total_allocations = 1;
    part.total_tensors = 1;
    part.allocations.push_back({ipc::HandleKind::kVmm, kAllocationBytes, {}, true});
    part.tensors.push_back({"w", "BF16", {64, 32}, 0, 512, kTensorBytes});
    return part;
  }
  [[nodiscard]] ipc::UniqueFd handle() const {
    return std::move(memory_->export_handle().value().fd);
  }
  /// The part, with the allocation's descriptor; a return is answered as it should be.
  [[nodiscard]] ScriptedLender::Script says(LoanPart part) const {
    return [this, part = std::move(part)](const LoanRequest& request) {
      std::vector<LenderPacket> answer;
      if (request.step == LoanStep::kReturn) {
        answer.push_back({ipc::encode(LoanPart{})});
        return answer;
      }
      answer.push_back({ipc::encode(part)});
      answer.back().fds.push_back(handle());
      return answer;
    };
  }
  /// What the script's lender is refused with.
  ipc::Error refusal(const ScriptedLender::Script& script, Deadline deadline) {
    lender_.emplace(socket_, script);
    const auto import = WeightsImport::open(socket_, deadline, cancelled_);
    if (!import) return import.error();
    ADD_FAILURE() << "it was believed";
    return {};
  }
  ipc::Error refusal(const ScriptedLender::Script& script) {
    return refusal(script, Deadline::after(20s));
  }
  static std::string name() { return fmt::format("exporter 'trainer' (pid {})", ::getpid()); }

  const test::ShortTempDir temp_;
  const std::filesystem::path socket_ = temp_ / "trainer.weights";
  const std::unique_ptr<ipc::Device> device_ = open_host(device_name());
  std::unique_ptr<ipc::DeviceMemory> memory_ =
      device_->allocate(kAllocationBytes, ipc::HandleKind::kVmm, nullptr).value();
  std::atomic<bool> cancelled_{false};
  std::optional<ScriptedLender> lender_;
};

TEST_F(WeightsImportTest, AnHonestLenderIsMappedAndHearsOfTheReturn) {
  lender_.emplace(socket_, says(honest()));
  auto import = WeightsImport::open(socket_, Deadline::after(20s), cancelled_);
  ASSERT_TRUE(import) << import.error().to_string();
  EXPECT_EQ(import->lender(), name());
  ASSERT_EQ(import->tensors().size(), 1U);
  ASSERT_TRUE(import->map(*device_));
  auto* ours = static_cast<unsigned char*>(memory_->address().raw());
  ours[512 + 7] = 42;
  EXPECT_EQ(static_cast<unsigned char*>(import->address(0).raw())[7], 42);
  EXPECT_TRUE(import->check_lender());
  EXPECT_TRUE(import->give_back(Deadline::after(20s)));
  EXPECT_EQ(lender_->returns(), 1);
}

/// One lie in what an honest lender says.
struct Lie {
  const char* name;
  void (*tell)(LoanPart&);
  ErrorCode code;
  const char* why;
};

class WeightsLieTest : public WeightsImportTest, public testing::WithParamInterface<Lie> {};

TEST_P(WeightsLieTest, IsRefusedByNameAndTheLenderHearsOfTheReturn) {
  LoanPart part = honest();
  GetParam().tell(part);
  const bool knows_handles = part.version == ipc::kWireVersion && !part.refused &&
                             part.total_allocations == 1 && part.total_tensors == 1 &&
                             part.allocations.size() == 1 && part.tensors.size() <= 1;
  const auto before = test::descriptor_kinds(::getpid());
  const ipc::Error error = refusal(says(part));
  EXPECT_EQ(error.code, GetParam().code) << error.message;
  EXPECT_THAT(error.message, HasSubstr(name()));
  EXPECT_THAT(error.message, HasSubstr(GetParam().why));
  EXPECT_LT(error.message.size(), 1000U) << "a message is for people";
  if (knows_handles) {
    EXPECT_EQ(lender_->returns(), 1);
  }
  lender_.reset();
  EXPECT_EQ(test::descriptor_kinds(::getpid()), before);
}

constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();

INSTANTIATE_TEST_SUITE_P(
    Of,
    WeightsLieTest,
    testing::Values(
        Lie{"AnotherVersion", [](LoanPart& part) { ++part.version; }, ErrorCode::kVersionMismatch,
            "it speaks version"},
        Lie{"ATensorThatEndsBehindItsAllocation",
            [](LoanPart& part) { part.tensors[0].offset = kAllocationBytes - 10; },
            ErrorCode::kProtocol, "of allocation 0, which has 2097152 bytes"},
        Lie{"AnOffsetThatWrapsAround", [](LoanPart& part) { part.tensors[0].offset = kMost - 100; },
            ErrorCode::kProtocol, "of allocation 0, which has 2097152 bytes"},
        Lie{"AnAllocationThatIsNotThere", [](LoanPart& part) { part.tensors[0].allocation = 7; },
            ErrorCode::kProtocol, "of allocation 7, which has 0 bytes"},
        Lie{"ASizeThatIsNotTheShapes", [](LoanPart& part) { part.tensors[0].size_bytes = 4095; },
            ErrorCode::kInvalidArgument, "takes 4096 bytes, not 4095"},
        Lie{"AShapeThatFitsNoMemory",
            [](LoanPart& part) {
              part.tensors[0].shape = {1ULL << 40U, 1ULL << 40U};
            },
            ErrorCode::kInvalidArgument, "does not fit any memory"},
        Lie{"AnUnknownType", [](LoanPart& part) { part.tensors[0].dtype = std::string(9000, 'Q'); },
            ErrorCode::kInvalidArgument, "is not known"},
        Lie{"TooManyDimensions",
            [](LoanPart& part) { part.tensors[0].shape = std::vector<std::uint64_t>(9, 1); },
            ErrorCode::kInvalidArgument, "it has 9 dimensions"},
        Lie{"ANameThatIsTooLong",
            [](LoanPart& part) {
              part.tensors[0].name = std::string(LoanPart::kMaxNameBytes + 1, 'w');
            },
            ErrorCode::kProtocol, "a name of 1025 bytes"},
        Lie{"MoreTensorsThanItSays",
            [](LoanPart& part) { part.tensors.push_back(part.tensors[0]); }, ErrorCode::kProtocol,
            "2 tensors at 0 of 1 do not follow"},
        Lie{"MoreAllocationsThanItSays", [](LoanPart& part) { part.total_allocations = 0; },
            ErrorCode::kProtocol, "1 allocations at 0 of 0"},
        Lie{"MoreTensorsThanThereCanBe",
            [](LoanPart& part) { part.total_tensors = ipc::kMaxWireElements + 1; },
            ErrorCode::kProtocol, "it lends 1048577 tensors"},
        Lie{"MoreAllocationsThanThereCanBe",
            [](LoanPart& part) { part.total_allocations = LoanPart::kMaxAllocations + 1; },
            ErrorCode::kProtocol, "in 65537 allocations"},
        Lie{"NothingThoughThereIsMore",
            [](LoanPart& part) {
              part.allocations.clear();
              part.tensors.clear();
            },
            ErrorCode::kProtocol, "do not follow"},
        Lie{"AnAllocationWithoutBytes", [](LoanPart& part) { part.allocations[0].size_bytes = 0; },
            ErrorCode::kProtocol, "allocation 0: 0 bytes"},
        Lie{"ATokenThatIsTooLong",
            [](LoanPart& part) { part.allocations[0].token.resize(LoanPart::kMaxTokenBytes + 1); },
            ErrorCode::kProtocol, "a token of 257 bytes"},
        Lie{"ADescriptorThatDidNotCome",
            [](LoanPart& part) {
              part.total_allocations = 2;
              part.allocations.push_back(part.allocations[0]);
            },
            ErrorCode::kProtocol, "descriptor 1 of 1"},
        Lie{"ADescriptorThatItDoesNotName",
            [](LoanPart& part) { part.allocations[0].has_fd = false; }, ErrorCode::kProtocol,
            "1 descriptors came for 0 allocations"},
        Lie{"ARefusalInSomebodyElsesName",
            [](LoanPart& part) {
              part.refused = KVFERRY_ERROR(kNoManager, "{}", std::string(100'000, 'x'));
            },
            ErrorCode::kProtocol, "xxx"}),
    [](const auto& lie) { return std::string(lie.param.name); });

TEST_F(WeightsImportTest, ARefusalIsHandedOn) {
  LoanPart part;
  part.refused = KVFERRY_ERROR(kNotReady, "it lends nothing more: it ends");
  const ipc::Error error = refusal(says(part));
  EXPECT_EQ(error.code, ErrorCode::kNotReady);
  EXPECT_EQ(error.message, name() + ": it lends nothing more: it ends");
}

TEST_F(WeightsImportTest, TotalsThatChangeAreRefused) {
  int parts = 0;
  const ipc::Error error = refusal([&](const LoanRequest& request) {
    LoanPart part = honest();
    part.total_tensors = 2 + (parts > 0 ? 1 : 0);
    if (parts++ > 0) part.allocations.clear();
    std::vector<LenderPacket> answer;
    answer.push_back({ipc::encode(request.step == LoanStep::kReturn ? LoanPart{} : part)});
    if (parts == 1) answer.back().fds.push_back(handle());
    return answer;
  });
  EXPECT_EQ(error.code, ErrorCode::kProtocol);
  EXPECT_THAT(error.message, HasSubstr(name() + ": it lends 3 tensors in 1 allocations, before it "
                                                "was 2 in 1"));
  EXPECT_EQ(lender_->returns(), 1);
}

TEST_F(WeightsImportTest, EveryTruncationAndWhatIsNoPacketIsRefused) {
  const std::vector<std::uint8_t> whole = ipc::encode(honest());
  std::vector<std::vector<std::uint8_t>> packets;
  for (std::size_t length = 1; length < whole.size(); ++length) {
    packets.emplace_back(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
  }
  packets.emplace_back(300, 0xc1);                                        // No type has this head.
  packets.emplace_back(ipc::PacketSocket::kMaxPacketBytes + 4096, 0x90);  // Is cut.
  const auto before = test::descriptor_kinds(::getpid());
  for (const auto& packet : packets) {
    const ipc::Error error = refusal([&](const LoanRequest& /*request*/) {
      std::vector<LenderPacket> answer;
      answer.push_back({packet});
      answer.back().fds.push_back(handle());
      return answer;
    });
    EXPECT_EQ(error.code, ErrorCode::kProtocol) << packet.size() << ": " << error.message;
    EXPECT_THAT(error.message, HasSubstr(name()));
  }
  lender_.reset();
  EXPECT_EQ(test::descriptor_kinds(::getpid()), before);
}

TEST_F(WeightsImportTest, ASilentLenderIsGivenUpAtTheDeadline) {
  const auto silent = [](const LoanRequest& /*request*/) { return std::vector<LenderPacket>(); };
  const ipc::Error error = refusal(silent, Deadline::after(200ms));
  EXPECT_EQ(error.code, ErrorCode::kTimeout);
  EXPECT_THAT(error.message, HasSubstr(name() + " did not answer by the deadline"));
  cancelled_ = true;
  EXPECT_EQ(refusal(silent).code, ErrorCode::kCancelled);
}

TEST_F(WeightsImportTest, ALenderThatClosesIsNotTakenForDead) {
  const ipc::Error error = refusal([](const LoanRequest& /*request*/) {
    std::vector<LenderPacket> answer;
    answer.push_back({{}, {}, true});
    return answer;
  });
  EXPECT_EQ(error.code, ErrorCode::kPeerDied);
  EXPECT_THAT(error.message, HasSubstr(name() + " closed its connection"));
}

/// One tensor for each question, and an answer to each at once: seconds, of all together.
ScriptedLender::Script in_small_pieces() {
  return [](const LoanRequest& request) {
    LoanPart part;
    part.total_tensors = ipc::kMaxWireElements;
    if (request.step == LoanStep::kTake) part.tensors.push_back({"none", "U8", {0}, 0, 0, 0});
    std::vector<LenderPacket> answer;
    answer.push_back({ipc::encode(part)});
    return answer;
  };
}

TEST_F(WeightsImportTest, ALenderThatAnswersInSmallPiecesCanBeGivenUp) {
  cancelled_ = true;
  EXPECT_EQ(refusal(in_small_pieces()).code, ErrorCode::kCancelled);
  cancelled_ = false;
  const ipc::Error late = refusal(in_small_pieces(), Deadline::after(500ms));
  EXPECT_EQ(late.code, ErrorCode::kTimeout);
  EXPECT_THAT(late.message, HasSubstr(name()));
}

/// What a lender's handle is, when it is not what it says.
struct FalseHandle {
  const char* name;
  ipc::UniqueFd (*make)(ipc::Device& device);
  std::uint64_t size_bytes;
  ipc::HandleKind kind;
};

class WeightsHandleTest : public WeightsImportTest,
                          public testing::WithParamInterface<FalseHandle> {};

TEST_P(WeightsHandleTest, IsRefusedByNameAndNothingStaysMapped) {
  LoanPart part = honest();
  part.total_allocations = 2;
  part.allocations.push_back({GetParam().kind, GetParam().size_bytes, {}, true});
  lender_.emplace(socket_, [&](const LoanRequest& request) {
    std::vector<LenderPacket> answer;
    answer.push_back({ipc::encode(request.step == LoanStep::kReturn ? LoanPart{} : part)});
    if (request.step == LoanStep::kReturn) return answer;
    answer.back().fds.push_back(handle());
    answer.back().fds.push_back(GetParam().make(*device_));
    return answer;
  });
  auto import = WeightsImport::open(socket_, Deadline::after(20s), cancelled_);
  ASSERT_TRUE(import) << import.error().to_string();
  const ipc::Status mapped = import->map(*device_);
  ASSERT_FALSE(mapped);
  EXPECT_EQ(mapped.error().code, ErrorCode::kProtocol) << mapped.error().message;
  EXPECT_THAT(mapped.error().message, HasSubstr(name() + ": its memory cannot be mapped on"));
  lender_.reset();  // With the descriptors that it gave.
  ASSERT_TRUE(memory_->release());
  memory_.reset();
  EXPECT_EQ(used_bytes(), 0U) << "the good one was mapped before";
}

ipc::UniqueFd allocation(ipc::Device& device) {
  return std::move(device.allocate(kAllocationBytes, ipc::HandleKind::kVmm, nullptr)
                       .value()
                       ->export_handle()
                       .value()
                       .fd);
}

ipc::UniqueFd on_another_device() { return allocation(*open_host(device_name() + "-other")); }

INSTANTIATE_TEST_SUITE_P(
    Of,
    WeightsHandleTest,
    testing::Values(
        FalseHandle{"MoreThanThereIs", allocation, 2 * kAllocationBytes, ipc::HandleKind::kVmm},
        FalseHandle{"LessThanThereIs", allocation, kAllocationBytes / 2, ipc::HandleKind::kVmm},
        FalseHandle{"AnotherKind", allocation, kAllocationBytes, ipc::HandleKind::kLegacy},
        FalseHandle{"AnotherDevice", [](ipc::Device& /*device*/) { return on_another_device(); },
                    kAllocationBytes, ipc::HandleKind::kVmm},
        FalseHandle{"MemoryThatCanShrink",
                    [](ipc::Device& /*device*/) {
                      ipc::UniqueFd fd(::memfd_create("plain", MFD_CLOEXEC));
                      EXPECT_EQ(::ftruncate(fd.get(), kAllocationBytes), 0);
                      return fd;
                    },
                    kAllocationBytes, ipc::HandleKind::kVmm},
        FalseHandle{"NoMemory",
                    [](ipc::Device& /*device*/) {
                      return ipc::UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC));
                    },
                    kAllocationBytes, ipc::HandleKind::kVmm}),
    [](const auto& handle) { return std::string(handle.param.name); });

class WeightsReturnTest : public WeightsImportTest, public testing::WithParamInterface<bool> {};

TEST_P(WeightsReturnTest, NobodyHearsOfIsAnErrorAndUnmapsAllTheSame) {
  const bool closes = GetParam();
  lender_.emplace(socket_, [&, honest = says(honest())](const LoanRequest& request) {
    if (request.step == LoanStep::kTake) return honest(request);
    std::vector<LenderPacket> answer;
    if (closes) answer.push_back({{}, {}, true});
    return answer;
  });
  auto import = WeightsImport::open(socket_, Deadline::after(20s), cancelled_);
  ASSERT_TRUE(import) << import.error().to_string();
  ASSERT_TRUE(import->map(*device_));
  const ipc::Status back = import->give_back(Deadline::after(200ms));
  ASSERT_FALSE(back);
  EXPECT_EQ(back.error().code, closes ? ErrorCode::kPeerDied : ErrorCode::kTimeout);
  EXPECT_THAT(back.error().message, HasSubstr(name()));
  lender_.reset();
  ASSERT_TRUE(memory_->release());
  memory_.reset();
  EXPECT_EQ(used_bytes(), 0U);
}

INSTANTIATE_TEST_SUITE_P(To, WeightsReturnTest, testing::Bool(), [](const auto& closes) {
  return std::string(closes.param ? "ALenderThatCloses" : "ASilentLender");
});

}  // namespace
}  // namespace kvferry::worker
