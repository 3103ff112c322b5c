// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Writes inputs of the binary targets as the product's own encoders make them: DIR/TARGET/NAME.
#include "bench/copier/messages.hpp"
#include "ipc/wire/message_filler.hpp"
#include "kvferry/ipc/lease/words.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "lease/lease_messages.hpp"
#include "lease/lease_words.hpp"
#include "scratch.hpp"
#include "support/lease_geometry.hpp"
#include "support/wire_messages.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdio>

namespace kvferry::fuzz {
namespace {

using namespace ipc::lease;

class Seeds {
 public:
  explicit Seeds(std::filesystem::path root) : root_(std::move(root)) {}

  void add(const char* target, const ipc::Bytes& bytes) {
    const std::filesystem::path folder = root_ / target;
    std::filesystem::create_directories(folder);
    write_file(folder / fmt::format("seed-{:04}", ++count_),
               {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  void add(const char* target, std::uint8_t choice, const ipc::Bytes& bytes) {
    ipc::Bytes all{choice};
    all.insert(all.end(), bytes.begin(), bytes.end());
    add(target, all);
  }

 private:
  std::filesystem::path root_;
  int count_ = 0;
};

template <typename T> T filled(std::uint64_t seed) {
  T message{};
  test::MessageFiller filler(seed);
  filler.fill(message);
  return message;
}

template <typename... T> struct AllMessages {
  static void add(Seeds& seeds) {
    std::uint8_t choice = 0;
    (add_one<T>(seeds, choice++), ...);
  }
  template <typename M> static void add_one(Seeds& seeds, std::uint8_t choice) {
    seeds.add("wire_messages", choice, ipc::encode(M{}));
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      seeds.add("wire_messages", choice, ipc::encode(filled<M>(seed)));
    }
  }
};

template <typename T> T of_this_version(T message) {
  message.version = ipc::kWireVersion;
  return message;
}

void add_first_messages(Seeds& seeds) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    seeds.add("wire_versions", ipc::encode(of_this_version(filled<ipc::RegistryHello>(seed))));
    seeds.add("wire_versions", ipc::encode(of_this_version(filled<ipc::RegistryWelcome>(seed))));
    seeds.add("wire_versions", ipc::encode(of_this_version(filled<ipc::Envelope>(seed))));
    seeds.add("worker_requests", 0, ipc::encode(of_this_version(filled<ipc::AgentHello>(seed))));
    seeds.add("worker_requests", 1, ipc::encode(filled<ipc::StageReply>(seed)));
  }
  for (const auto kind : {ipc::StageKind::kGather, ipc::StageKind::kScatter}) {
    ipc::StageRequest request;
    request.kind = kind;
    request.blocks = {0, 9, 3};
    seeds.add("worker_requests", 2, ipc::encode(request));
  }
  for (const auto kind : {ipc::StageKind::kStore, ipc::StageKind::kLoad}) {
    ipc::StageRequest request;
    request.kind = kind;
    request.blocks = {0, 9, 3};
    request.parts = {{ipc::RegionSet::kSharded, 0, 3, 4096},
                     {ipc::RegionSet::kReplicated, 1, 2, 0}};
    seeds.add("worker_requests", 2, ipc::encode(request));
  }
  ipc::Step step;
  step.decode_steps = 2;
  step.fills = {{ipc::GroupId{0}, ipc::BlockId{3}, 1}, {ipc::GroupId{1}, ipc::BlockId{4}, 2}};
  step.reads = {{ipc::GroupId{1}, ipc::BlockId{0}}};
  step.verifies = {{ipc::GroupId{0}, ipc::BlockId{3}, 1}};
  seeds.add("worker_requests", 3, ipc::encode(step));
}

void add_copier_messages(Seeds& seeds) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    seeds.add("copier_requests", 0, ipc::encode(filled<cli::CopierSetUp>(seed)));
    seeds.add("copier_requests", 1, ipc::encode(filled<cli::CopierReady>(seed)));
    seeds.add("copier_requests", 2, ipc::encode(filled<cli::CopyReply>(seed)));
    seeds.add("copier_requests", 3, ipc::encode(filled<cli::CopyRequest>(seed)));
  }
  cli::CopyRequest request;
  request.id = 8;
  request.items = {{ipc::GroupId{0}, ipc::BlockId{9}, 0},
                   {ipc::GroupId{1}, ipc::BlockId{3}, cli::kCopyPieceBytes}};
  seeds.add("copier_requests", 3, ipc::encode(request));
}

void add_jobs(Seeds& seeds) {
  ipc::MoverJob job;
  for (std::uint32_t i = 0; i < 8; ++i) {
    ipc::MoverItem item;
    item.block = ipc::BlockId{i < 4 ? i : 9 * i};
    item.shard_offset = std::uint64_t{i} << 14U;
    job.items.push_back(item);
  }
  for (const std::uint8_t piece : std::to_array<std::uint8_t>({0, 5}))
    seeds.add("mover_jobs", piece, ipc::encode(job));
  seeds.add("mover_jobs", 7, ipc::encode(filled<ipc::MoverJob>(3)));
}

template <typename T>
void add_lease_packet(Seeds& seeds, std::uint8_t fds, LeaseMessage message, const T& body) {
  ipc::Bytes bytes{fds, static_cast<std::uint8_t>(message), 0, 0, 0};
  for (unsigned i = 0; i < 4; ++i) {
    bytes.push_back(static_cast<std::uint8_t>(ipc::kLeaseProtocolVersion >> (8 * i)));
  }
  const ipc::Bytes encoded = ipc::encode(body);
  bytes.insert(bytes.end(), encoded.begin(), encoded.end());
  seeds.add("lease_messages", bytes);
}

HelloBody mover_of_chat() {
  HelloBody hello;
  hello.identity.instance = "default";
  hello.identity.engine = "chat";
  hello.identity.self = ipc::ProcessKind::kMover;
  hello.identity.incarnation = ipc::Digest::from_words(3, 4);
  return hello;
}

void add_lease_packets(Seeds& seeds) {
  add_lease_packet(seeds, 1, LeaseMessage::kHello, mover_of_chat());
  add_lease_packet(seeds, 1, LeaseMessage::kWelcome, WelcomeBody{mover_of_chat(), {}, {}});
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    add_lease_packet(seeds, 1, LeaseMessage::kHello, filled<HelloBody>(seed));
    add_lease_packet(seeds, 0, LeaseMessage::kRefused, filled<RefusedBody>(seed));
    add_lease_packet(seeds, 0, LeaseMessage::kGrant, filled<GrantBody>(seed));
  }
  add_lease_packet(seeds, 0, LeaseMessage::kAttach, AttachBody{ipc::Epoch{1}});
  add_lease_packet(seeds, 0, LeaseMessage::kRevoke, RevokeBody{ipc::Epoch{1}});
  for (const auto message :
       {LeaseMessage::kReleased, LeaseMessage::kPrepared, LeaseMessage::kBye}) {
    add_lease_packet(seeds, 0, message, LeaseBody{ipc::LeaseId{7}});
  }
}

void add_part(ipc::Bytes& input, const GrantBody& part) {
  const ipc::Bytes body = ipc::encode(part);
  input.push_back(static_cast<std::uint8_t>(body.size() >> 8U));
  input.push_back(static_cast<std::uint8_t>(body.size()));
  input.push_back(static_cast<std::uint8_t>(part.handles.size()));
  input.insert(input.end(), body.begin(), body.end());
}

void add_grants(Seeds& seeds, ipc::ArenaOrder order, ipc::HandleKind kind, std::size_t per_part) {
  const ipc::ArenaLayout layout = test::small_layout(test::small_geometry(2, 1), order);
  ipc::Bytes input{kind == ipc::HandleKind::kLegacy ? std::uint8_t{1} : std::uint8_t{0}};
  GrantBody part;
  part.epoch = ipc::Epoch{3};
  part.lease = ipc::LeaseId{9};
  part.prepared = ipc::LeaseId{4};
  part.total = static_cast<std::uint32_t>(layout.segment_bytes.size());
  part.layout = layout;
  for (const std::uint64_t bytes : layout.segment_bytes) {
    part.handles.push_back({kind, bytes, {1, 2}, true});
    if (part.handles.size() < per_part) continue;
    add_part(input, part);
    part.first += static_cast<std::uint32_t>(part.handles.size());
    part.handles.clear();
    part.layout.reset();
  }
  if (!part.handles.empty()) add_part(input, part);
  seeds.add("lease_grant", input);
}

ipc::Bytes read_all(int fd, std::size_t size) {
  ipc::Bytes bytes(size);
  KVFERRY_CHECK(::pread(fd, bytes.data(), size, 0) == static_cast<ssize_t>(size), "short file");
  return bytes;
}

void add_words(Seeds& seeds) {
  const ipc::Digest nonce = ipc::Digest::from_words(1, 2);
  auto owner = OwnerWords::create(nonce);
  auto attacher = AttacherWords::create(nonce);
  KVFERRY_CHECK(owner && attacher, "no words");
  owner->move({ipc::Epoch{1}, ipc::LeasePhase::kReady});
  attacher->release_up_to(ipc::LeaseId{7});
  for (const std::uint8_t choice : std::to_array<std::uint8_t>({0, 1, 2})) {
    seeds.add("lease_words", choice, read_all(owner->fd(), ipc::words::kOwnerSegmentBytes));
    seeds.add("lease_words", choice, read_all(attacher->fd(), ipc::words::kAttacherSegmentBytes));
  }
}

using Say = ipc::Transition;
constexpr std::uint8_t kOwner = 0;
constexpr std::uint8_t kAttacher = 1;

// As transition_ring tells stories: process, transition, session, epoch, lease, peer, detail.
void tell(ipc::Bytes& story, std::uint8_t process, Say what, std::uint8_t lease = 0) {
  const std::uint8_t peer = process == kOwner ? kAttacher : kOwner;
  for (const unsigned value : {unsigned{process}, static_cast<unsigned>(what), 77U, 1U,
                               unsigned{lease}, unsigned{peer}, 0U}) {
    story.push_back(static_cast<std::uint8_t>(value));
  }
}

void add_rings(Seeds& seeds) {
  ipc::Bytes story;
  tell(story, kOwner, Say::kOwnerReady);
  tell(story, kAttacher, Say::kAttacherAsk);
  for (const Say what : {Say::kOwnerRecord, Say::kOwnerGranted}) tell(story, kOwner, what, 1);
  for (const Say what : {Say::kAttacherGrant, Say::kAttacherImport, Say::kAttacherMapped}) {
    tell(story, kAttacher, what, 1);
  }
  for (const Say what : {Say::kOwnerDrain, Say::kOwnerDrained, Say::kOwnerRevoke}) {
    tell(story, kOwner, what);
  }
  seeds.add("transition_ring", 1, story);
  ipc::Bytes death = story;
  for (const Say what : {Say::kAttacherDrain, Say::kAttacherDrained, Say::kAttacherUnmap,
                         Say::kAttacherUnmapped, Say::kAttacherRelease, Say::kAttacherReleased}) {
    tell(story, kAttacher, what, 1);
  }
  tell(story, kOwner, Say::kOwnerSeesRelease, 1);
  tell(death, kOwner, Say::kOwnerSeesDeath, 1);
  for (const Say what : {Say::kOwnerFree, Say::kOwnerFreed, Say::kOwnerCleared}) {
    tell(story, kOwner, what);
    tell(death, kOwner, what);
  }
  seeds.add("transition_ring", 1, story);
  seeds.add("transition_ring", 1, death);

  const ScratchDir scratch;
  const auto dir = ipc::RuntimeDir::open(scratch.path().native(), "seeds");
  KVFERRY_CHECK(dir.has_value(), "no runtime directory");
  const auto log = ipc::TransitionLog::create(*dir, {.role = "worker", .engine = "chat"}, 16);
  KVFERRY_CHECK(log.has_value(), "no ring");
  log->record(Say::kOwnerReady, {.session = ipc::Digest::from_words(1, 2), .epoch = ipc::Epoch{1}});
  for (const auto& ring : std::filesystem::directory_iterator(dir->transitions_folder())) {
    std::ifstream file(ring.path(), std::ios::binary);
    const ipc::Bytes bytes{std::istreambuf_iterator<char>(file), {}};
    seeds.add("transition_ring", 0, bytes);
  }
}

}  // namespace
}  // namespace kvferry::fuzz

int main(int argc, char** argv) {
  using namespace kvferry;
  if (argc != 2) {
    std::fputs("usage: kvferry_fuzz_seeds DIR\n", stderr);
    return 2;
  }
  fuzz::Seeds seeds(argv[1]);
  test::WireMessages<fuzz::AllMessages>::add(seeds);
  fuzz::add_first_messages(seeds);
  fuzz::add_copier_messages(seeds);
  fuzz::add_jobs(seeds);
  fuzz::add_lease_packets(seeds);
  for (const auto order : {ipc::ArenaOrder::kLayerFirst, ipc::ArenaOrder::kLayerFirstMany,
                           ipc::ArenaOrder::kBlockFirst}) {
    fuzz::add_grants(seeds, order, ipc::HandleKind::kVmm, 64);
    fuzz::add_grants(seeds, order, ipc::HandleKind::kLegacy, 2);
  }
  fuzz::add_words(seeds);
  fuzz::add_rings(seeds);
  return 0;
}
