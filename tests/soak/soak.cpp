// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/soak.hpp"

#include "device/host_ledger.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/model/geometry.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

namespace kvferry::soak {
namespace {

using ipc::Deadline;
using ipc::ErrorCode;
using ipc::Status;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using std::chrono_literals::operator""us;

constexpr ipc::Duration kStartTime = 60s;
/// Beyond every deadline that is judged: a run that meets it has hung.
constexpr ipc::Duration kHang = 60s;
constexpr ipc::Duration kCallTime = 30s;
constexpr ipc::Duration kLookAgain = 5ms;
/// What has ended may take so long to show: late news, a pidfd that is closed on the next round.
constexpr ipc::Duration kSettle = 3s;
constexpr std::size_t kMaxTold = 50;
constexpr std::uint64_t kCyclesPerStall = 1000;
constexpr auto kStallTime = 6'000'000us;

double ms_between(ipc::TimePoint from, ipc::TimePoint to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

std::vector<ipc::DeviceSpec> parse_devices(const std::vector<std::string>& texts) {
  std::vector<ipc::DeviceSpec> specs;
  for (const std::string& text : texts) {
    auto spec = ipc::DeviceSpec::parse(text);
    if (!spec) throw ipc::Exception(spec.error());
    specs.push_back(*std::move(spec));
  }
  return specs;
}

}  // namespace

Soak::Soak(SoakOptions options)
    : options_(std::move(options)),
      random_(options_.seed),
      probe_(parse_devices(options_.fleet.devices)) {
  const FleetOptions& fleet = options_.fleet;
  fleet_ = std::make_unique<Fleet>(fleet);
  keeper_ = std::make_unique<Keeper>(*fleet_);
  const auto ranks = static_cast<std::uint32_t>(fleet.devices.size());
  TrafficOptions traffic;
  auto geometry = ipc::load_geometry(fleet.geometry, ranks);
  if (!geometry) throw ipc::Exception(geometry.error());
  traffic.geometry = *geometry;
  traffic.client.runtime_dir = fleet.runtime_dir.string();
  traffic.client.instance = fleet.instance;
  traffic.client.engine = fleet.engine;
  traffic.client.ranks = ranks;
  traffic.client.identity.model = "soak";
  traffic.client.identity.fingerprint = geometry->fingerprint(ipc::ArenaOrder::kLayerFirst);
  traffic.client.identity.weights = ipc::Digest::hash("soak", 4);
  traffic.seed = options_.seed;
  traffic.corrupt_one = options_.leak == Leak::kData;
  auto client = worker::Client::connect(traffic.client, Deadline::after(kStartTime));
  if (!client) throw ipc::Exception(client.error());
  client_ = std::move(*client);
  traffic_ = std::make_unique<Traffic>(std::move(traffic));
  auto dir = ipc::RuntimeDir::open(fleet.runtime_dir.string(), fleet.instance);
  if (!dir) throw ipc::Exception(dir.error());
  dir_ = *dir;
  trace_ = std::make_unique<TraceReader>(fleet.runtime_dir, fleet.instance,
                                         fleet.log_dir / "trace-reader.log");
  watch_memory_return();
}

Soak::~Soak() = default;

// Where kvferry's own books are the kernel's: which objects the dead owner had, and when the last
// of them is gone. A device of the driver names no objects.
void Soak::watch_memory_return() {
  struct Watched {
    std::string device;
    std::set<ipc::ObjectId> objects;
    ipc::TimePoint since;
  };
  const auto watched = std::make_shared<std::map<std::string, Watched>>();
  const auto device_of = [this](const Member& member) {
    const Role owner = options_.fleet.owner == "worker" ? Role::kWorker : Role::kMover;
    if (member.role != owner) return std::string();
    const std::size_t rank = std::stoul(member.name.substr(member.name.find('/') + 1));
    const auto spec = ipc::DeviceSpec::parse(options_.fleet.devices[rank]);
    return spec && spec->kind == ipc::DeviceKind::kHost ? spec->host_name : std::string();
  };
  Keeper::Watch watch;
  watch.before_kill = [watched, device_of](const Member& member) {
    const std::string device = device_of(member);
    if (device.empty()) return;
    const auto ledger = ipc::read_host_ledger(device);
    if (!ledger) return;
    Watched& entry = (*watched)[member.name];
    entry = {device, {}, ipc::MonotonicClock::now()};
    for (const auto& [object, bytes] : ledger->object_bytes) {
      if (bytes > 0) entry.objects.insert(object);
    }
  };
  watch.is_over = [this, watched](const Member& member) {
    const auto entry = watched->find(member.name);
    if (entry == watched->end()) return true;
    const auto ledger = ipc::read_host_ledger(entry->second.device);
    if (!ledger) return true;
    for (const auto& [object, bytes] : ledger->object_bytes) {
      if (entry->second.objects.contains(object)) return false;
    }
    if (!entry->second.objects.empty()) {
      seen_.back_ms.push_back(ms_between(entry->second.since, ipc::MonotonicClock::now()));
    }
    watched->erase(entry);
    return true;
  };
  keeper_->watch(std::move(watch));
}

std::vector<Blow> Soak::plan_blows(std::uint64_t number) {
  const auto share = [this] {
    return static_cast<double>(random_() >> 11U) * (1.0 / 9007199254740992.0);
  };
  // Each kind of process has a third of the run in which it is not killed: long enough a life to
  // see what it keeps.
  const auto spared = static_cast<Role>(std::min<std::uint64_t>(2, number * 3 / options_.cycles));
  const auto delay = [&] {
    return std::chrono::microseconds(static_cast<std::int64_t>(share() * 1200 * usual_cycle_ms_));
  };
  const std::vector<Member>& members = fleet_->members();
  const bool stall = number % kCyclesPerStall == kCyclesPerStall / 2;
  const double chance = share();
  if (!stall && chance < options_.kill_share) {
    std::vector<std::size_t> victims;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (members[i].role != spared) victims.push_back(i);
    }
    std::shuffle(victims.begin(), victims.end(), random_);
    std::vector<Blow> blows = {{victims.front(), delay(), {}}};
    if (share() < 0.1) blows.push_back({victims[1], delay(), {}});
    return blows;
  }
  if (stall || chance < options_.kill_share + options_.stop_share) {
    Blow blow{random_() % members.size(), delay(), {}};
    const double longest_ms = share() < 0.8 ? 100 : 1000;
    blow.stopped =
        std::chrono::microseconds(1000 + static_cast<std::int64_t>(share() * 1000 * longest_ms));
    // Longer than an owner waits: a mover is ended for it.
    if (stall && members[blow.member].role != spared) blow.stopped = kStallTime;
    return {blow};
  }
  return {};
}

Status Soak::wait_for_news(Deadline deadline) {
  pollfd entry{client_->fd(), POLLIN, 0};
  (void)::poll(&entry, 1, Deadline::after(kLookAgain).earlier(deadline).poll_timeout_ms());
  (void)client_->poll(1);
  if (!deadline.expired()) return ipc::ok();
  return KVFERRY_ERROR(kTimeout, "not done in {} s",
                       std::chrono::duration_cast<std::chrono::seconds>(kHang).count());
}

Status Soak::clear(Cycle& cycle) {
  const Deadline deadline = Deadline::after(kHang);
  for (;;) {
    const auto cleared = client_->clear(worker::HostPolicy::kKeep, Deadline::after(kCallTime));
    if (cleared) {
      cycle.quarantined = cleared->quarantined;
      return ipc::ok();
    }
    switch (cleared.error().code) {
      case ErrorCode::kNoManager:
      case ErrorCode::kPeerDied:
      case ErrorCode::kNotReady:
      case ErrorCode::kRevoked:
      case ErrorCode::kStaleEpoch:
      case ErrorCode::kBusy: break;
      default: return cleared.error();
    }
    if (!cycle.struck) return cleared.error();
    if (const Status time = wait_for_news(deadline); !time) return cleared.error();
  }
}

Status Soak::reinit() {
  const Deadline deadline = Deadline::after(kHang);
  for (;;) {
    const auto done = client_->reinit(0, Deadline::after(kCallTime));
    if (!done) {
      switch (done.error().code) {
        case ErrorCode::kNoManager:
        case ErrorCode::kPeerDied:
        case ErrorCode::kNotReady:
        case ErrorCode::kRevoked:
        case ErrorCode::kStaleEpoch:
        case ErrorCode::kNoDeviceMemory:
        case ErrorCode::kQuarantined:
        case ErrorCode::kBusy: break;
        default: return done.error();
      }
    }
    if (client_->wait_ready(true, Deadline::after(100ms))) return ipc::ok();
    if (const Status time = wait_for_news(deadline); !time) return done ? time : done.error();
  }
}

void Soak::fork_child() {
  if (options_.around.fork_share <= 0 ||
      std::bernoulli_distribution(1 - options_.around.fork_share)(random_)) {
    return;
  }
  constexpr int kLongestMs = 100;
  children_.fork_one(static_cast<int>(random_() % kLongestMs), [this] { client_.reset(); });
}

void Soak::run_cycle(std::uint64_t number) {
  Cycle cycle;
  std::vector<Blow> blows = plan_blows(number);
  cycle.struck = !blows.empty();
  for (const Blow& blow : blows) {
    cycle.stopped_ms += std::chrono::duration<double, std::milli>(blow.stopped).count();
  }
  std::string planned;
  for (const Blow& blow : blows) {
    planned += fmt::format("{} {}; ", blow.is_kill() ? "kill" : "stop",
                           fleet_->members()[blow.member].name);
  }
  const auto fail = [&](const char* what, const Status& status) {
    seen_.wrong.push_back(
        fmt::format("cycle {} ({}): {}: {}", number, planned, what, status.error().to_string()));
    if (seen_.wrong.size() >= kMaxTold || status.error().code == ErrorCode::kTimeout)
      aborted_ = true;
  };
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  if (cycle.struck) keeper_->begin(std::move(blows));
  fork_child();
  if (const Status cleared = clear(cycle); !cleared) fail("clear", cleared);
  const ipc::TimePoint cleared = ipc::MonotonicClock::now();
  if (const Status ready = reinit(); !ready) fail("re-init", ready);
  const ipc::TimePoint ready = ipc::MonotonicClock::now();
  cycle.clear_ms = ms_between(start, cleared);
  cycle.reinit_ms = ms_between(cleared, ready);
  if (cycle.struck && !keeper_->wait_over(Deadline::after(kHang))) {
    fail("blows", KVFERRY_ERROR(kTimeout, "a process was not replaced"));
  }
  // The commander may learn of a new manager later than the traffic does.
  if (const Status back = client_->wait_ready(true, Deadline::after(kHang)); !back) {
    fail("back", back);
  }
  if (!traffic_->wait_round(Deadline::after(kHang))) {
    fail("traffic", KVFERRY_ERROR(kTimeout, "no block was moved for 60 s"));
  }
  cycle.whole_ms = ms_between(start, ipc::MonotonicClock::now());
  if (!cycle.struck) usual_cycle_ms_ = 0.95 * usual_cycle_ms_ + 0.05 * cycle.whole_ms;
  seen_.cycles[cycle_count_++] = cycle;
}

std::vector<std::string> Soak::still_open() {
  const auto text = client_->status(Deadline::after(kCallTime));
  if (!text) return {text.error().to_string()};
  const nlohmann::json status = nlohmann::json::parse(*text);
  std::vector<std::string> open;
  if (status["proofs_open"] != 0) open.emplace_back("the manager waits for a proof");
  if (status["engines"].size() != 1) return {"the engine is not there"};
  // The traffic keeps at most so many, and one that is under way.
  if (status["sequences"]["count"] > Traffic::kMaxStored + 1) {
    open.push_back(fmt::format("{} sequences are kept", status["sequences"]["count"].dump()));
  }
  const nlohmann::json& engine = status["engines"][0];
  if (engine["phase"] != "ready" || engine["offload_ready"] != true) {
    open.push_back(fmt::format("phase {}, offload ready: {}", engine["phase"].dump(),
                               engine["offload_ready"].dump()));
  }
  for (const nlohmann::json& rank : engine["ranks"]) {
    for (const char* role : {"worker", "mover"}) {
      if (rank[role]["quarantined_bytes"] == 0) continue;
      open.push_back(fmt::format("a {} has {} bytes in quarantine: {}", role,
                                 rank[role]["quarantined_bytes"].dump(),
                                 rank[role]["note"].dump()));
    }
  }
  return open;
}

Look Soak::look_once() {
  Look look;
  children_.wait_all();
  keeper_->call([&] {
    for (const Member& member : fleet_->members()) {
      if (!member.process.valid()) continue;
      look.processes.push_back(look_at_process(member.name, member.process.pid(), member.lives));
    }
  });
  look.processes.push_back(look_at_process("engine", ::getpid(), 1));
  look_around(dir_->path(), look);
  if (const auto free = probe_.free_now()) {
    for (const cli::DeviceFree& device : *free) {
      const auto spec = ipc::DeviceSpec::parse(device.device);
      const bool exact = spec && spec->kind == ipc::DeviceKind::kHost;
      (exact ? look.device_used : look.driver_used) +=
          (exact ? spec->host_capacity_bytes : (1ULL << 40U)) - device.free_bytes;
    }
  }
  return look;
}

void Soak::look(std::uint64_t number) {
  if (!traffic_->pause(Deadline::after(kHang))) {
    seen_.wrong.push_back(fmt::format("cycle {}: the traffic does not come to rest", number));
    aborted_ = true;
    return;
  }
  if (const Status checked = trace_->check(Deadline::after(kHang)); !checked) {
    seen_.wrong.push_back(fmt::format("cycle {}: {}", number, checked.error().to_string()));
    aborted_ = true;
  }
  const Deadline deadline = Deadline::after(kSettle);
  Look now = look_once();
  std::vector<std::string> found;
  for (;;) {
    found = still_open();
    const Look before = std::exchange(now, look_once());
    const auto changes = differences(seen_.first ? *seen_.first : before, now);
    found.insert(found.end(), changes.begin(), changes.end());
    if (found.empty() || !wait_for_news(deadline)) break;
  }
  // A change is told once, and later ones by comparison with it.
  if (!seen_.first || !found.empty()) seen_.first = now;
  for (const std::string& change : found) {
    if (seen_.changes.size() < kMaxTold) {
      seen_.changes.push_back(fmt::format("cycle {}: {}", number, change));
    }
  }
  keep(number, now);
  traffic_->go_on();
}

// Numbers alone, in memory that was there from the beginning: this process is looked at, too.
void Soak::keep(std::uint64_t number, const Look& look) {
  Sample sample;
  sample.cycle = number;
  sample.driver_used = look.driver_used;
  sample.rings = look.rings;
  for (std::size_t i = 0; i < look.processes.size() && i < sample.processes.size(); ++i) {
    const ProcessLook& process = look.processes[i];
    if (seen_.names.size() == i) seen_.names.push_back(process.name);
    sample.processes.at(i) = {process.life, process.descriptors, process.private_bytes,
                              process.resident_bytes, process.heap_bytes};
  }
  if (sample_count_ < seen_.samples.size()) seen_.samples[sample_count_++] = sample;
}

void Soak::leak(std::uint64_t number) {
  constexpr std::size_t kPage = 4096;
  switch (options_.leak) {
    case Leak::kNone:
    case Leak::kData: return;
    case Leak::kDescriptor:
      if (number % options_.look_every == 0) (void)::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
      return;
    case Leak::kMemory:
      leaked_.push_back(std::make_unique<std::vector<char>>(16 * kPage, 'x'));
      return;
    case Leak::kName:
      (void)ipc::UniqueFd(::open((dir_->path() / fmt::format("leak-{}", number)).c_str(),
                                 O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
      return;
  }
}

Seen Soak::run() {
  seen_.cycles.assign(options_.cycles, {});
  seen_.samples.assign(options_.cycles / options_.look_every + 2, {});
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  const Deadline end = options_.at_most == ipc::Duration::zero()
                           ? Deadline::at(ipc::TimePoint::max())
                           : Deadline::after(options_.at_most);
  ipc::TimePoint told = start;
  for (std::uint64_t number = 0; number < options_.cycles && !aborted_; ++number) {
    if (end.expired()) break;
    run_cycle(number);
    leak(number);
    if (number % options_.look_every == 0 || number + 1 == options_.cycles) look(number);
    if (ipc::MonotonicClock::now() - told > 30s) {
      told = ipc::MonotonicClock::now();
      fmt::print(stderr, "soak: {} of {} cycles, {} kills, {:.0f} s\n", number + 1, options_.cycles,
                 keeper_->kills(), ms_between(start, told) / 1000);
    }
  }
  seen_.cycles.resize(cycle_count_);
  seen_.samples.resize(sample_count_);
  traffic_->stop();
  seen_.traffic = traffic_->counts();
  seen_.trace = trace_->counts();
  client_->close();
  keeper_->stop();
  seen_.kills = keeper_->kills();
  seen_.stops = keeper_->stops();
  seen_.ended_by_owner = keeper_->ended_by_owner();
  children_.wait_all();
  if (children_.failed() != 0) {
    seen_.wrong.push_back(fmt::format("{} forked children did not end well", children_.failed()));
  }
  seen_.around = {read_odd_counts(), fleet_->pids_reused(), children_.forked()};
  seen_.deaths = keeper_->unexpected();
  for (std::string& wrong : fleet_->end_all(15s)) seen_.wrong.push_back(std::move(wrong));
  const Deadline settled = Deadline::after(kSettle);
  for (;;) {
    const auto taken = probe_.taken_bytes();
    if (!taken) {
      seen_.wrong.push_back(taken.error().to_string());
      break;
    }
    seen_.used_in_the_end = *taken;
    if (*taken == 0 || settled.expired()) break;
    (void)::poll(nullptr, 0, 10);
  }
  seen_.seconds = ms_between(start, ipc::MonotonicClock::now()) / 1000;
  return std::move(seen_);
}

}  // namespace kvferry::soak
