// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/copier/copier.hpp"

#include "bench/arena_blocks.hpp"
#include "bench/copier/copy_lane.hpp"
#include "bench/copier/messages.hpp"
#include "bench/copier/pinned_pieces.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/worker/compute_load.hpp"
#include "must.hpp"

#include <poll.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

/// Of the engine, which has nothing else to do.
constexpr ipc::Duration kEngineAnswers = 10s;
constexpr int kPacketsOfARound = 16;
constexpr std::uint32_t kLanesOfTheRing = 2;

class Copier {
 public:
  explicit Copier(const CopierConfig& config);
  void run();

 private:
  [[nodiscard]] CopierSetUp receive_set_up();
  void make_lanes(OwnStrategy strategy);
  [[nodiscard]] std::vector<ipc::DevicePtr> slots_of(std::uint32_t lane) const;
  void on_readable();
  void on_packet(const ipc::Packet& packet);
  void answer(const CopyReply& reply);
  [[nodiscard]] bool has_news() const;
  void end(const std::optional<ipc::Error>& why);

  ipc::SignalFd signals_;  ///< Before anything starts threads.
  ipc::EventLoop loop_;
  const CopierConfig& config_;
  ipc::PacketSocket socket_;
  std::unique_ptr<ipc::Device> device_;
  ipc::ArenaLayout layout_;
  std::optional<ArenaBlocks> arena_;
  std::optional<PinnedPieces> pool_;
  CopyBounds bounds_;
  std::uint64_t last_id_ = 0;
  std::size_t unanswered_ = 0;
  std::optional<ipc::Error> failed_;
  std::unique_ptr<worker::RunningLoad> load_;
  std::array<std::unique_ptr<CopyLane>, kLanesOfTheRing> lanes_;  ///< Last: they use all above.
};

Copier::Copier(const CopierConfig& config) : config_(config) {
  socket_ = must(ipc::PacketSocket::connect(config_.socket, ipc::Deadline::after(kEngineAnswers)));
  device_ = ipc::open_device(config_.rank.device);
  layout_ = must(ipc::plan_arena(config_.rank.geometry, config_.rank.arena));
  arena_.emplace(*device_, layout_, config_.rank.handles);
  const CopierSetUp set_up = receive_set_up();
  bounds_.pool_bytes = set_up.pool_bytes;
  for (std::uint32_t g = 0; g < arena_->groups(); ++g) {
    bounds_.groups.push_back(
        {arena_->block_count(ipc::GroupId{g}), arena_->packed_bytes(ipc::GroupId{g})});
  }
  make_lanes(set_up.strategy);
  if (config_.load) {
    load_ = worker::start_compute_load(*device_, *config_.load, [this](const ipc::Error& error) {
      loop_.post([this, error] { end(error); });
    });
  }
  const CopierReady ready{layout_.fingerprint, layout_.total_bytes()};
  must(socket_.send(ipc::encode(ready)));
  loop_.watch(socket_.fd(), [this] { on_readable(); });
  loop_.watch(signals_.fd(), [this] {
    if (signals_.take() != 0) loop_.stop();
  });
  ipc::log_info("copies by itself: {}, arena of {} bytes, pool of {} bytes",
                to_string(set_up.strategy), layout_.total_bytes(), set_up.pool_bytes);
}

CopierSetUp Copier::receive_set_up() {
  // wait: the engine's first message; kEngineAnswers; its end of file
  const ipc::Packet packet = must(socket_.receive(ipc::Deadline::after(kEngineAnswers)));
  const CopierSetUp set_up = must(ipc::decode<CopierSetUp>(packet.bytes, "CopierSetUp"));
  if (packet.fds.size() != 1) {
    throw ipc::Exception(
        KVFERRY_ERROR(kProtocol, "a set-up carries {} descriptors, expected 1", packet.fds.size()));
  }
  pool_.emplace(*device_, must(ipc::SharedMemory::map_pool(packet.fds.front(), set_up.pool_bytes)));
  return set_up;
}

// Each lane has its half of the ring, as in a mover.
std::vector<ipc::DevicePtr> Copier::slots_of(std::uint32_t lane) const {
  const ipc::StagingRing& ring = layout_.staging;
  std::vector<ipc::DevicePtr> slots;
  for (std::uint32_t slot = lane; slot < ring.slots; slot += kLanesOfTheRing) {
    slots.push_back(arena_->segment(ring.segment) + (ring.offset + slot * ring.slot_bytes));
  }
  return slots;
}

void Copier::make_lanes(OwnStrategy strategy) {
  for (const CopyBounds::Group& group : bounds_.groups) {
    if (strategy != OwnStrategy::kStaged || group.packed_bytes <= layout_.staging.slot_bytes) {
      continue;
    }
    throw ipc::Exception(KVFERRY_ERROR(kInvalidArgument,
                                       "a block of {} bytes fits no staging slot of {}; give more "
                                       "--staging-slot-bytes",
                                       group.packed_bytes, layout_.staging.slot_bytes));
  }
  for (std::uint32_t lane = 0; lane < kLanesOfTheRing; ++lane) {
    lanes_.at(lane) = std::make_unique<CopyLane>(CopyLane::Context{
        loop_, *device_, *arena_, *pool_, strategy,
        lane == 0 ? ipc::CopyDirection::kDeviceToHost : ipc::CopyDirection::kHostToDevice,
        slots_of(lane), layout_.staging.slot_bytes,
        [this](const CopyReply& reply) { answer(reply); },
        [this](const ipc::Error& error) { end(error); }, [this] { return has_news(); }});
  }
}

void Copier::run() {
  (void)loop_.run();
  if (failed_) throw ipc::Exception(*failed_);
}

bool Copier::has_news() const {
  pollfd news{socket_.fd(), POLLIN, 0};
  // wait-none: looks only
  return ::poll(&news, 1, 0) > 0;
}

void Copier::on_readable() {
  for (int i = 0; i < kPacketsOfARound && !failed_; ++i) {
    auto packet = socket_.try_receive();
    if (!packet) {
      // The engine's end is the end: nobody is left to copy for.
      const bool gone = packet.error().code == ipc::ErrorCode::kPeerDied;
      return end(gone ? std::nullopt : std::optional(packet.error()));
    }
    if (!packet->has_value()) break;
    on_packet(**packet);
  }
  // All that came together shares the device's notices.
  for (const auto& lane : lanes_) lane->pump();
}

void Copier::on_packet(const ipc::Packet& packet) {
  auto request = ipc::decode<CopyRequest>(packet.bytes, "CopyRequest");
  if (!request) return end(request.error());
  if (!packet.fds.empty() || unanswered_ >= kMostCopyRequests) {
    return end(KVFERRY_ERROR(kProtocol,
                             "request {} carries {} descriptors and comes after {} without a "
                             "reply, expected none and fewer than {}",
                             request->id, packet.fds.size(), unanswered_, kMostCopyRequests));
  }
  const ipc::Status good = check_copy_request(*request, last_id_, bounds_);
  if (!good && good.error().code == ipc::ErrorCode::kProtocol) return end(good.error());
  last_id_ = request->id;
  ++unanswered_;
  if (!good) return answer({request->id, good.error()});
  const bool to_host = request->direction == ipc::CopyDirection::kDeviceToHost;
  lanes_.at(to_host ? 0 : 1)->submit(std::move(*request));
}

void Copier::answer(const CopyReply& reply) {
  --unanswered_;
  // The replies to all requests that may be out fit the socket: a full one is not read any more.
  if (const auto sent = socket_.send(ipc::encode(reply)); !sent) {
    const bool gone = sent.error().code == ipc::ErrorCode::kPeerDied;
    end(gone ? std::nullopt : std::optional(sent.error()));
  }
}

void Copier::end(const std::optional<ipc::Error>& why) {
  if (!failed_) failed_ = why;
  loop_.stop();
}

}  // namespace

void run_copier(const CopierConfig& config) { Copier(config).run(); }

}  // namespace kvferry::cli
