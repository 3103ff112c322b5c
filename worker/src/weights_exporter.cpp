// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/weights_exporter.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/log_gate.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/loan_messages.hpp"
#include "safetensors.hpp"
#include "service_thread.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::LoanPart;
using ipc::Result;
using ipc::Status;

namespace {

/// Encoded, with room for what is around them; a packet holds 128 KiB.
constexpr std::size_t kTensorsPerPartBytes = 96UL * 1024;
/// Beyond name and dtype, of one tensor.
constexpr std::size_t kTensorWireBytes = 160;
/// With tokens of kMaxTokenBytes they leave room for tensors.
constexpr std::size_t kAllocationsPerPart = ipc::PacketSocket::kMaxFds;
constexpr std::size_t kMaxBorrowers = 256;
constexpr std::chrono::milliseconds kAcceptPause{100};

/// What is lent, described once.
struct Lending {
  std::vector<std::unique_ptr<ipc::BorrowedMemory>> allocations;
  std::vector<ipc::LentTensor> tensors;
};

/// Who may have the memory mapped. Shared by the thread that serves and those that ask.
struct Borrowers {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<pid_t> pids;
  bool no_more_come = false;
};

Result<std::uint32_t> allocation_of(ipc::Device& device,
                                    ipc::DevicePtr address,
                                    std::map<std::uintptr_t, std::uint32_t>& known,
                                    Lending& lending) {
  KVFERRY_ASSIGN(auto memory, device.borrow(address));
  const auto found = known.find(memory->address().address);
  if (found != known.end()) return found->second;
  if (lending.allocations.size() == LoanPart::kMaxAllocations) {
    return KVFERRY_ERROR(kInvalidArgument, "tensors in more than {} allocations: use larger ones",
                         LoanPart::kMaxAllocations);
  }
  const auto number = static_cast<std::uint32_t>(lending.allocations.size());
  known.emplace(memory->address().address, number);
  lending.allocations.push_back(std::move(memory));
  return number;
}

Status lend(ipc::Device& device,
            ExportedTensor& tensor,
            std::map<std::uintptr_t, std::uint32_t>& known,
            Lending& lending) {
  if (tensor.name.size() > LoanPart::kMaxNameBytes) {
    return KVFERRY_ERROR(kInvalidArgument, "tensor '{}': a name of {} bytes; at most {} are taken",
                         shown(tensor.name), tensor.name.size(), LoanPart::kMaxNameBytes);
  }
  KVFERRY_ASSIGN(const std::uint64_t size,
                 size_of(TensorInfo{tensor.name, tensor.dtype, tensor.shape, 0, 0}));
  ipc::LentTensor lent{
      std::move(tensor.name), std::move(tensor.dtype), std::move(tensor.shape), 0, 0, size};
  if (size > 0) {
    auto number = allocation_of(device, tensor.address, known, lending);
    if (!number) {
      ipc::Error error = number.error();
      error.message = fmt::format("tensor '{}': {}", shown(lent.name), error.message);
      return error;
    }
    const ipc::BorrowedMemory& memory = *lending.allocations[*number];
    lent.allocation = *number;
    lent.offset = tensor.address.address - memory.address().address;
    if (size > memory.size_bytes() - lent.offset) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "tensor '{}': {} bytes at byte {} of an allocation of {}: it ends "
                           "behind it",
                           shown(lent.name), size, lent.offset, memory.size_bytes());
    }
  }
  lending.tensors.push_back(std::move(lent));
  return ipc::ok();
}

/// Serves borrowers. @threading the loop's thread.
class LendingService {
 public:
  LendingService(ipc::EventLoop& loop,
                 ipc::PacketListener listener,
                 Lending& lending,
                 Borrowers& borrowers)
      : loop_(loop), listener_(std::move(listener)), lending_(lending), borrowers_(borrowers) {
    loop_.watch(listener_->fd(), [this] { accept(); });
  }
  LendingService(const LendingService&) = delete;
  LendingService& operator=(const LendingService&) = delete;
  ~LendingService() {
    stop_lending();
    for (auto& [number, borrower] : peers_) unwatch(borrower);
  }

  void stop_lending() {
    if (!listener_) return;
    loop_.cancel(accept_timer_);
    loop_.unwatch(listener_->fd());
    listener_.reset();
  }

 private:
  struct Peer {
    std::optional<ipc::PacketSocket> socket;
    ipc::ProcessRef process;
    bool holds = false;  ///< It was given handles, and has not said that it let go of them.
  };

  void accept();
  void pause_accepting();
  void refuse(ipc::PacketSocket& socket, const std::string& why);
  void warn(std::string_view what);
  void on_readable(std::uint64_t number);
  [[nodiscard]] Status answer(Peer& peer, const ipc::Packet& packet);
  [[nodiscard]] Status hand_out(Peer& peer, const ipc::LoanRequest& request);
  void on_closed(std::uint64_t number, const ipc::Error& why);
  void forget(std::uint64_t number);
  void unwatch(Peer& peer);
  void tell_borrowers();

  ipc::EventLoop& loop_;
  std::optional<ipc::PacketListener> listener_;  ///< Until nothing more is lent.
  Lending& lending_;
  Borrowers& borrowers_;
  std::map<std::uint64_t, Peer> peers_;
  std::uint64_t last_peer_ = 0;
  ipc::TimerId accept_timer_ = 0;
  ipc::LogGate gate_;
};

void LendingService::accept() {
  while (listener_) {
    auto socket = listener_->try_accept();
    if (!socket) {
      warn(socket.error().to_string());
      return pause_accepting();
    }
    if (!socket->has_value()) return;
    auto process = (*socket)->peer();
    if (!process || peers_.size() >= kMaxBorrowers) {
      refuse(**socket, process ? fmt::format("{} borrowers are there", peers_.size())
                               : process.error().message);
      continue;
    }
    const std::uint64_t number = ++last_peer_;
    Peer& peer = peers_[number];
    peer.socket.emplace(std::move(**socket));
    peer.process = std::move(process).value();
    loop_.watch(peer.socket->fd(), [this, number] { on_readable(number); });
    // The kernel's proof that nothing is mapped any more, whatever it has said.
    loop_.watch(peer.process.pidfd(), [this, number] { forget(number); });
  }
}

// Out of descriptors: the connection stays in the backlog, and trying again at once would spin.
void LendingService::pause_accepting() {
  loop_.unwatch(listener_->fd());
  accept_timer_ =
      loop_.after(kAcceptPause, [this] { loop_.watch(listener_->fd(), [this] { accept(); }); });
}

// Out of descriptors for what would tell of its death, say: it is told so, and may come again.
void LendingService::refuse(ipc::PacketSocket& socket, const std::string& why) {
  warn(fmt::format("borrower pid {} is refused: {}", socket.peer_pid(), why));
  LoanPart part;
  part.refused = KVFERRY_ERROR(kNotReady, "it takes no borrower now: {}; retry", why);
  // One that is gone hears nothing.
  if (const Status sent = socket.send(ipc::encode(part)); !sent) warn(sent.error().message);
}

void LendingService::warn(std::string_view what) {
  std::uint64_t suppressed = 0;
  if (gate_.open(suppressed)) {
    ipc::log_warn("weights: {} ({} more like it)", what, suppressed);
  }
}

void LendingService::on_readable(std::uint64_t number) {
  Peer& peer = peers_.at(number);
  auto packet = peer.socket->try_receive();
  if (!packet) return on_closed(number, packet.error());
  if (!packet->has_value()) return;
  const Status answered = answer(peer, **packet);
  if (!answered) on_closed(number, answered.error());
}

Status LendingService::answer(Peer& peer, const ipc::Packet& packet) {
  KVFERRY_ASSIGN(const auto request, ipc::decode<ipc::LoanRequest>(packet.bytes, "LoanRequest"));
  if (request.version != ipc::kWireVersion) {
    LoanPart refusal;
    refusal.refused = KVFERRY_ERROR(kVersionMismatch, "it speaks version {}, asked in {}",
                                    ipc::kWireVersion, request.version);
    return peer.socket->send(ipc::encode(refusal));
  }
  if (request.step == ipc::LoanStep::kReturn) {
    peer.holds = false;
    tell_borrowers();  // Whoever hears of the answer may ask who has the memory mapped.
    return peer.socket->send(ipc::encode(LoanPart{}));
  }
  return hand_out(peer, request);
}

Status LendingService::hand_out(Peer& peer, const ipc::LoanRequest& request) {
  LoanPart part;
  if (!listener_) {
    part.refused = KVFERRY_ERROR(kNotReady, "it lends nothing more: it ends");
    return peer.socket->send(ipc::encode(part));
  }
  part.total_allocations = static_cast<std::uint32_t>(lending_.allocations.size());
  part.total_tensors = static_cast<std::uint32_t>(lending_.tensors.size());
  if (request.first_allocation > part.total_allocations ||
      request.first_tensor > part.total_tensors) {
    return KVFERRY_ERROR(kProtocol, "asked for allocation {} of {}, tensor {} of {}",
                         request.first_allocation, part.total_allocations, request.first_tensor,
                         part.total_tensors);
  }
  std::vector<ipc::ExportedHandle> handles;
  std::vector<int> fds;
  const std::size_t end =
      std::min<std::size_t>(part.total_allocations, request.first_allocation + kAllocationsPerPart);
  for (std::size_t i = request.first_allocation; i < end; ++i) {
    KVFERRY_ASSIGN(ipc::ExportedHandle handle, lending_.allocations[i]->export_handle());
    part.allocations.push_back(
        {handle.kind, handle.size_bytes, std::move(handle.token), handle.fd.valid()});
    if (handle.fd.valid()) fds.push_back(handle.fd.get());
    handles.push_back(std::move(handle));
  }
  std::size_t bytes = 0;
  for (std::size_t i = request.first_tensor;
       end == part.total_allocations && i < part.total_tensors; ++i) {
    const ipc::LentTensor& tensor = lending_.tensors[i];
    bytes += tensor.name.size() + tensor.dtype.size() + kTensorWireBytes;
    if (bytes > kTensorsPerPartBytes) break;
    part.tensors.push_back(tensor);
  }
  peer.holds = peer.holds || !handles.empty();
  tell_borrowers();
  return peer.socket->send(ipc::encode(part), fds);
}

// Closed is not dead: what it was given may still be mapped.
void LendingService::on_closed(std::uint64_t number, const ipc::Error& why) {
  Peer& peer = peers_.at(number);
  loop_.unwatch(peer.socket->fd());
  peer.socket.reset();
  if (!peer.holds) return forget(number);
  ipc::log_warn(
      "weights: pid {} closed its connection and did not say that it let go ({}): it "
      "counts until it ends",
      peer.process.pid(), why.message);
}

void LendingService::forget(std::uint64_t number) {
  unwatch(peers_.at(number));
  peers_.erase(number);
  tell_borrowers();
}

void LendingService::unwatch(Peer& peer) {
  if (peer.socket) loop_.unwatch(peer.socket->fd());
  loop_.unwatch(peer.process.pidfd());
}

void LendingService::tell_borrowers() {
  {
    const std::lock_guard lock(borrowers_.mutex);
    borrowers_.pids.clear();
    for (const auto& [number, peer] : peers_) {
      if (peer.holds) borrowers_.pids.push_back(peer.process.pid());
    }
  }
  borrowers_.changed.notify_all();
}

}  // namespace

class WeightsExporter::Impl {
 public:
  Impl(ipc::RuntimeDir dir, ipc::PacketListener listener, Lending lending)
      : dir_(std::move(dir)),
        lending_(std::move(lending)),
        service_(
            "kvf-lend",
            [this, shared = std::make_shared<ipc::PacketListener>(std::move(listener))](
                ipc::EventLoop& loop) {
              return std::make_unique<LendingService>(loop, std::move(*shared), lending_,
                                                      borrowers_);
            },
            [] { ipc::log_error("weights: the thread that lends them ended; see above"); }) {}

  [[nodiscard]] std::size_t borrowers() {
    const std::lock_guard lock(borrowers_.mutex);
    return borrowers_.pids.size();
  }

  [[nodiscard]] Status close(Deadline deadline) {
    service_.post([this](LendingService& service) {
      service.stop_lending();
      {
        const std::lock_guard lock(borrowers_.mutex);
        borrowers_.no_more_come = true;
      }
      borrowers_.changed.notify_all();
    });
    std::unique_lock lock(borrowers_.mutex);
    // wait: borrowers to let go of the memory; deadline, of the caller; their deaths
    const bool free = borrowers_.changed.wait_until(lock, deadline.when(), [this] {
      return borrowers_.no_more_come && borrowers_.pids.empty();
    });
    if (free) return ipc::ok();
    return KVFERRY_ERROR(kTimeout,
                         "processes {} still have weights mapped that are lent here: wait until "
                         "their update has ended, or end them, before the memory is freed",
                         fmt::join(borrowers_.pids, ", "));
  }

 private:
  ipc::RuntimeDir dir_;
  Lending lending_;
  Borrowers borrowers_;
  ServiceThread<LendingService> service_;  ///< Last: ends before what it uses.
};

WeightsExporter::WeightsExporter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WeightsExporter::~WeightsExporter() = default;

Result<std::unique_ptr<WeightsExporter>> WeightsExporter::start(
    ipc::Device& device, ExporterOptions options, std::vector<ExportedTensor> tensors) {
  if (tensors.empty() || tensors.size() > ipc::kMaxWireElements) {
    return KVFERRY_ERROR(kInvalidArgument, "{} tensors to lend: 1 to {} are possible",
                         tensors.size(), ipc::kMaxWireElements);
  }
  KVFERRY_ASSIGN(ipc::RuntimeDir dir, ipc::RuntimeDir::open(options.runtime_dir, options.instance));
  KVFERRY_ASSIGN(const auto socket, dir.weights_socket(options.name));
  Lending lending;
  std::map<std::uintptr_t, std::uint32_t> known;
  for (ExportedTensor& tensor : tensors) KVFERRY_TRY(lend(device, tensor, known, lending));
  KVFERRY_ASSIGN(ipc::PacketListener listener, ipc::PacketListener::listen(socket));
  try {
    return std::unique_ptr<WeightsExporter>(new WeightsExporter(
        std::make_unique<Impl>(std::move(dir), std::move(listener), std::move(lending))));
  } catch (const ipc::Exception& error) {
    return error.error();
  }
}

std::size_t WeightsExporter::borrowers() const { return impl_->borrowers(); }
Status WeightsExporter::close(Deadline deadline) { return impl_->close(deadline); }

}  // namespace kvferry::worker
