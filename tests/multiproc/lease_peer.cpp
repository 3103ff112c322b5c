// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// One process of the unlink handshake, owner or attacher, that does what stdin says and tells on
// stdout what happens. See lease_peer.hpp for its commands.
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "support/child_side.hpp"
#include "support/lease_geometry.hpp"
#include "support/region_source.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using namespace kvferry::ipc;
using kvferry::test::hear;
using kvferry::test::say;

using Arguments = std::map<std::string, std::string>;

// An arena user whose moments the test drives: each callback can be held at a gate or made to fail.
class GatedUser final : public ArenaUser {
 public:
  // dirt: what new memory is filled with by a mover, as a driver might; hold: a gate that is closed
  // from the start.
  GatedUser(bool zeroes, const std::string& dirt, const std::string& hold)
      : zeroes_(zeroes), dirt_(dirt.empty() ? 0 : std::stoi(dirt)) {
    closed_[hold] = true;
  }

  Status on_mapped(SessionId /*session*/, Arena& arena, ArenaContents contents) override {
    {
      const std::lock_guard lock(mutex_);
      arena_ = &arena;
    }
    pass("mapped", arena.epoch(), nullptr);
    if (fails("mapped")) return KVFERRY_ERROR(kNoDeviceMemory, "on_mapped was told to fail");
    if (zeroes_ && contents == ArenaContents::kUndefined) zero(arena);
    if (!zeroes_ && dirt_ != 0) fill(dirt_);
    return {};
  }

  Status quiesce(Epoch epoch, Deadline deadline) override {
    if (!pass("quiesce", epoch, &deadline)) {
      return KVFERRY_ERROR(kTimeout, "the gate stayed closed until the deadline");
    }
    return fails("quiesce") ? KVFERRY_ERROR(kTimeout, "quiesce was told to fail") : Status();
  }

  void on_unmapped(Epoch epoch) override {
    pass("unmapped", epoch, nullptr);
    const std::lock_guard lock(mutex_);
    arena_ = nullptr;
  }

  void on_freed(Epoch epoch) override { pass("freed", epoch, nullptr); }

  void close_gate(const std::string& name) {
    const std::lock_guard lock(mutex_);
    closed_[name] = true;
  }
  void open_gate(const std::string& name) {
    const std::lock_guard lock(mutex_);
    closed_[name] = false;
    changed_.notify_all();
  }
  void fail_next(const std::string& name, int count) {
    const std::lock_guard lock(mutex_);
    failures_[name] = count;
  }
  // First byte of the arena, or -1 when none is mapped.
  int peek() {
    const std::lock_guard lock(mutex_);
    return arena_ == nullptr ? -1 : *static_cast<unsigned char*>(arena_->segment(0).raw());
  }
  // Every byte of the arena.
  void fill(int value) {
    const std::lock_guard lock(mutex_);
    if (arena_ == nullptr) return;
    for (std::uint32_t i = 0; i < arena_->layout().segment_bytes.size(); ++i) {
      std::memset(arena_->segment(i).raw(), value, arena_->layout().segment_bytes[i]);
    }
  }
  [[nodiscard]] int zeroings() const { return zeroings_; }
  // Bytes of the arena with another value; -1 when none is mapped.
  std::int64_t count_others(int value) {
    const std::lock_guard lock(mutex_);
    if (arena_ == nullptr) return -1;
    std::int64_t others = 0;
    for (std::uint32_t i = 0; i < arena_->layout().segment_bytes.size(); ++i) {
      const auto* bytes = static_cast<const unsigned char*>(arena_->segment(i).raw());
      others += std::count_if(bytes, bytes + arena_->layout().segment_bytes[i],
                              [value](unsigned char byte) { return byte != value; });
    }
    return others;
  }
  void poke(int value) {
    const std::lock_guard lock(mutex_);
    if (arena_ != nullptr) std::memset(arena_->segment(0).raw(), value, 1);
  }
  std::uintptr_t address() {
    const std::lock_guard lock(mutex_);
    return arena_ == nullptr ? 0 : arena_->segment(0).address;
  }

 private:
  // In two halves, with a gate between them.
  void zero(Arena& arena) {
    const std::vector<std::uint64_t>& sizes = arena.layout().segment_bytes;
    std::memset(arena.segment(0).raw(), 0, sizes[0] / 2);
    pass("zeroing", arena.epoch(), nullptr);
    for (std::uint32_t i = 0; i < sizes.size(); ++i) {
      std::memset(arena.segment(i).raw(), 0, sizes[i]);
    }
    // Under the lock, so that who looks at the memory next finds it zeroed.
    const std::lock_guard lock(mutex_);
    ++zeroings_;
  }
  bool pass(const std::string& name, Epoch epoch, const Deadline* deadline) {
    std::unique_lock lock(mutex_);
    if (!closed_[name]) return true;
    say(fmt::format("at {} {}", name, epoch.value));
    const auto open = [&] { return !closed_[name]; };
    if (deadline != nullptr) return changed_.wait_until(lock, deadline->when(), open);
    changed_.wait(lock, open);
    return true;
  }
  bool fails(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return failures_[name]-- > 0;
  }

  const bool zeroes_;
  const int dirt_;
  std::atomic<int> zeroings_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, bool> closed_;
  std::map<std::string, int> failures_;
  Arena* arena_ = nullptr;
};

// An engine whose next release() the test decides on. What an epoch's addresses were stays taken,
// so that the next one has others.
class GatedSource final : public ArenaSource {
 public:
  GatedSource(Device& device, HandleKind kind) : source_(device, kind) {}

  Result<std::vector<RegionMemory>> allocate(const ArenaRequest& request) override {
    const std::lock_guard lock(mutex_);
    if (again_) return last_;
    auto regions = source_.allocate(request);
    if (regions) last_ = *regions;
    return regions;
  }

  Status release(Epoch epoch) override {
    const std::lock_guard lock(mutex_);
    const std::string mode = std::exchange(mode_, "");
    source_.before_release = [&mode]() -> Status {
      if (mode == "throw") throw std::runtime_error("no such tensor");
      return mode == "fail" ? KVFERRY_ERROR(kBusy, "release was told to fail") : Status();
    };
    source_.keeps_memory = mode == "keep";
    std::vector<std::pair<void*, std::size_t>> places;
    for (const auto& memory : source_.memory_of(epoch.value)) {
      places.emplace_back(memory->address().raw(), memory->size_bytes());
    }
    const Status released = source_.release(epoch);
    if (!mode.empty()) return released;
    for (const auto& [address, size] : places) {
      ::mmap(address, size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    }
    return released;
  }

  // count EPOCH; fail, throw, keep: what the next release() does; free: everything that is left;
  // again: allocate() gives the last epoch's regions.
  std::string obey(const std::string& verb, std::uint64_t epoch) {
    const std::lock_guard lock(mutex_);
    if (verb == "count") return fmt::format("released {} {}", epoch, source_.release_count(epoch));
    if (verb == "free") {
      source_.free_all();
      return "freed";
    }
    if (verb == "again") {
      again_ = true;
    } else {
      mode_ = verb;
    }
    return verb;
  }

 private:
  std::mutex mutex_;
  kvferry::test::RegionSource source_;
  std::vector<RegionMemory> last_;
  std::string mode_;
  bool again_ = false;
};

std::string describe(const LeaseView& view) {
  const auto code = [](const std::optional<Error>& error) {
    return error ? std::string(to_string(error->code)) : std::string("-");
  };
  return fmt::format("view {} {} {} {} {} {} {} {} {} {}", to_string(view.phase), view.epoch.value,
                     view.session.is_zero() ? "alone" : "connected",
                     view.mapped ? "mapped" : "unmapped", view.prepared_by.value,
                     view.lease_holders.size(), view.quarantined_bytes, code(view.refused),
                     code(view.peer_refused), view.note.empty() ? "-" : view.note);
}

LeaseOptions parse_options(Arguments& arguments, const Geometry& geometry, ArenaOrder order) {
  LeaseOptions options;
  LeaseIdentity& me = options.identity;
  me.instance = "test";
  me.engine = "chat";
  me.rank = Rank{0};
  me.ranks = geometry.ranks;
  me.self = arguments["self"] == "mover"    ? ProcessKind::kMover
            : arguments["self"] == "engine" ? ProcessKind::kEngine
                                            : ProcessKind::kWorker;
  me.cache_owner = arguments["owner"] == "mover" ? CacheOwner::kMover : CacheOwner::kWorker;
  me.handles = arguments["handles"] == "legacy" ? HandleKind::kLegacy : HandleKind::kVmm;
  me.fingerprint = geometry.fingerprint(order);
  me.incarnation = Digest::random();
  const auto set = [&](const char* name, std::chrono::milliseconds& value) {
    if (!arguments[name].empty()) value = std::chrono::milliseconds(std::stoi(arguments[name]));
  };
  set("hello", options.timeouts.hello);
  set("drain", options.timeouts.drain);
  set("revoke", options.timeouts.revoke);
  set("kill", options.timeouts.kill);
  set("settle", options.timeouts.settle);
  options.stable_addresses = arguments["stable"] != "no";
  return options;
}

int count_fds() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    count += entry.path().empty() ? 0 : 1;
  }
  return count;
}

struct Mappings {
  int of_objects{0};  // of files and memory objects: all that a lease maps, and never an allocator
  int anonymous{0};   // of heaps and stacks, and of a sanitizer's own memory
};

Mappings count_mappings() {
  std::ifstream maps("/proc/self/maps");
  Mappings count;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream in(line);
    std::string addresses, permissions, offset, device, inode;
    in >> addresses >> permissions >> offset >> device >> inode;
    ++(inode == "0" ? count.anonymous : count.of_objects);
  }
  return count;
}

// Ends every connection of this process to another one, as a lost network would; how many.
int cut_connections() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename().native());
    int type = 0;
    socklen_t size = sizeof(type);
    sockaddr_storage peer{};
    socklen_t peer_size = sizeof(peer);
    const bool packets =
        ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET;
    const bool connected =
        packets && ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0;
    if (connected && ::shutdown(fd, SHUT_RDWR) == 0) ++count;
  }
  return count;
}

// A child of this process that does nothing: it keeps what it inherited. Only async-signal-safe
// calls in it. Its descriptors are closed, so that only the mapping is left.
pid_t fork_keeper() {
  const pid_t child = ::fork();
  if (child == 0) {
    for (int fd = 0; fd < 256; ++fd) ::close(fd);
    for (;;) ::pause();
  }
  return child;
}

class Peer {
 public:
  explicit Peer(Arguments arguments)
      : geometry_(kvferry::test::small_geometry(
            static_cast<std::uint32_t>(std::stoi(arguments["layers"])),
            static_cast<std::uint32_t>(std::stoi(arguments["ranks"])))),
        order_(arguments["many"] == "yes" ? ArenaOrder::kLayerFirstMany : ArenaOrder::kLayerFirst),
        options_(parse_options(arguments, geometry_, order_)),
        user_(
            options_.identity.self == ProcessKind::kWorker, arguments["dirt"], arguments["hold"]) {
    auto spec = DeviceSpec::parse(arguments["device"]);
    if (!spec) throw Exception(spec.error());
    device_ = open_device(*spec);
    auto dir = RuntimeDir::open(arguments["dir"], options_.identity.instance);
    if (!dir) throw Exception(dir.error());
    const FaultPlan faults = FaultPlan::parse(arguments["faults"]).value();
    auto log = TransitionLog::create(*dir,
                                     {.role = arguments["self"],
                                      .engine = options_.identity.engine,
                                      .rank = options_.identity.rank,
                                      .incarnation = options_.identity.incarnation},
                                     TransitionLog::kDefaultRecords, faults);
    if (!log) throw Exception(log.error());
    options_.transitions = *std::move(log);
    const auto changed = [](const LeaseView& view) { say(describe(view)); };
    if (options_.identity.is_owner()) {
      if (arguments["source"] == "yes") {
        source_ = std::make_unique<GatedSource>(*device_, options_.identity.handles);
      }
      owner_ =
          std::make_unique<LeaseOwner>(options_, *dir, *device_, user_, changed, source_.get());
    } else {
      attacher_ =
          std::make_unique<LeaseAttacher>(options_, *dir, *device_, geometry_, user_, changed);
    }
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer() {
    {
      std::unique_lock lock(calls_mutex_);
      calls_ended_.wait(lock, [this] { return calls_ == 0; });
    }
    owner_.reset();
    attacher_.reset();
  }

  bool obey(const std::string& line) {
    std::istringstream in(line);
    std::string verb;
    std::string name;
    std::uint64_t epoch = 0;
    int ms = 0;
    in >> verb;
    if (verb == "init") {
      in >> ms;
      start([this, ms] { init(ms); });
    } else if (verb == "clear" || verb == "detach") {
      in >> epoch >> ms;
      start([this, verb, epoch, ms] { end_epoch(verb, Epoch{epoch}, ms); });
    } else if (verb == "wait") {
      in >> epoch >> ms;
      start([this, epoch, ms] {
        say("waiting");
        wait(Epoch{epoch}, ms);
      });
    } else if (verb == "close") {
      in >> name;
      user_.close_gate(name);
      say("closed " + name);
    } else if (verb == "open") {
      in >> name;
      say("opened " + name);  // Before what that lets happen says its own.
      user_.open_gate(name);
    } else if (verb == "fail") {
      in >> name >> ms;
      user_.fail_next(name, ms);
      say("failing " + name);
    } else if (verb == "source") {
      in >> name >> epoch;
      say(source_->obey(name, epoch));
    } else if (verb == "poke") {
      in >> ms;
      user_.poke(ms);
      say("poked");
    } else if (verb == "fill") {
      in >> ms;
      user_.fill(ms);
      say("filled");
    } else if (verb == "others") {
      in >> ms;
      say(fmt::format("others {}", user_.count_others(ms)));
    } else if (verb == "zeroings") {
      say(fmt::format("zeroings {}", user_.zeroings()));
    } else if (verb == "peek") {
      say(fmt::format("peeked {}", user_.peek()));
    } else if (verb == "address") {
      say(fmt::format("address {:#x}", user_.address()));
    } else if (verb == "resources") {
      const Mappings mappings = count_mappings();
      say(fmt::format("resources {} {} {}", count_fds(), mappings.of_objects, mappings.anonymous));
    } else if (verb == "leave") {
      owner_.reset();
      attacher_.reset();
      say("left");
    } else if (verb == "cut") {
      say(fmt::format("cut {}", cut_connections()));
    } else if (verb == "fork") {
      say(fmt::format("forked {}", fork_keeper()));
    } else {
      return false;
    }
    return true;
  }

 private:
  // Detached: a mover that exits because it cannot drain leaves no thread unjoined.
  void start(std::function<void()> call) {
    {
      const std::lock_guard lock(calls_mutex_);
      ++calls_;
    }
    std::thread([this, call = std::move(call)] {
      call();
      const std::lock_guard lock(calls_mutex_);
      --calls_;
      calls_ended_.notify_all();
    }).detach();
  }

  void init(int ms) {
    const ArenaLayout layout = kvferry::test::small_layout(geometry_, order_);
    const auto epoch = owner_->init(layout, Deadline::after(std::chrono::milliseconds(ms)));
    say(epoch ? fmt::format("init ok {}", epoch->value)
              : fmt::format("init error {} {}", to_string(epoch.error().code),
                            epoch.error().message));
  }

  void end_epoch(const std::string& verb, Epoch epoch, int ms) {
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(ms));
    const auto outcome =
        owner_ ? owner_->clear(epoch, deadline) : attacher_->detach(epoch, deadline);
    say(outcome
            ? fmt::format("{} {} {} {} {}", verb, to_string(outcome->kind),
                          outcome->quarantined_bytes, outcome->took.count() / 1000, outcome->detail)
            : fmt::format("{} error {} {}", verb, to_string(outcome.error().code),
                          outcome.error().message));
  }

  void wait(Epoch epoch, int ms) {
    const Status mapped =
        attacher_->wait_mapped(epoch, Deadline::after(std::chrono::milliseconds(ms)));
    say(mapped ? std::string("wait ok")
               : fmt::format("wait error {} {}", to_string(mapped.error().code),
                             mapped.error().message));
  }

  Geometry geometry_;
  ArenaOrder order_;
  LeaseOptions options_;
  std::unique_ptr<Device> device_;
  GatedUser user_;
  std::unique_ptr<GatedSource> source_;
  std::unique_ptr<LeaseOwner> owner_;
  std::unique_ptr<LeaseAttacher> attacher_;
  std::mutex calls_mutex_;  // guards calls_
  std::condition_variable calls_ended_;
  int calls_ = 0;  // that run, each on a thread of its own
};

}  // namespace

int main(int argc, char** argv) {
  kvferry::test::disable_core_dumps();
  Arguments arguments{{"layers", "2"}, {"ranks", "1"}};
  for (int i = 1; i < argc; ++i) {
    const std::string text(argv[i]);
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) return 64;
    arguments[text.substr(0, equals)] = text.substr(equals + 1);
  }
  init_logging(arguments["self"], LogLevel::kInfo);
  try {
    Peer peer(arguments);
    say("up");
    while (const auto line = hear()) {
      if (!peer.obey(*line)) break;  // "quit"
    }
  } catch (const Exception& exception) {
    say(fmt::format("failed {} {}", to_string(exception.error().code), exception.error().message));
    return 3;
  }
  say("down");
  return 0;
}
