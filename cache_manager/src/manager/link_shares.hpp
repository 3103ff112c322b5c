// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>

namespace kvferry::cache_manager {

/// Whose job goes next over a link that several engines copy over, each direction for itself.
///
/// While one engine alone has jobs there, it sends what it has. Between several, each gets bytes in
/// proportion to its weight as long as it has jobs: start-time fair queueing with a bound on what
/// is under way (SFQ(D): Jin, Chase, Kaur, "Interposed proportional sharing for a storage service
/// utility", SIGMETRICS 2004). An engine's tag is the bytes that it has sent by its weight; the
/// lowest goes next, once there is room. Whoever had nothing to send begins where the others are:
/// nobody saves time up. What was sent is the movers': shares are as even as jobs are large.
///
/// Whose turn it is may have no room, as it has its share under way; others wait for it then. Not
/// for one that was told to copy slowly, nor for one of which nothing has ended for long, as its
/// mover stands still. Others pass it, each up to its own share.
/// @threading one thread.
class LinkShares {
 public:
  /// Under way at once on a link and a direction, of engines that share it: more than 1 ms of a
  /// GPU's link, ten times what a job's end takes to be known. And never less than two jobs, so
  /// that one is copied while the other is prepared.
  static constexpr std::uint64_t kBytesUnderWay = 64ULL << 20U;
  static constexpr std::uint32_t kJobsUnderWay = 2;
  /// Nothing of an engine has ended for so long, and what it has under way would have come to its
  /// end at so many bytes in a second: it is passed by.
  static constexpr std::chrono::milliseconds kPatience{50};
  static constexpr std::uint64_t kSlowBytesPerSecond = 1ULL << 30U;

  struct Lane {
    std::uint32_t link = 0;
    bool to_host = false;
    friend bool operator==(const Lane&, const Lane&) = default;
    friend bool operator<(const Lane& a, const Lane& b) {
      return std::tie(a.link, a.to_host) < std::tie(b.link, b.to_host);
    }
  };
  /// An engine that has something to send.
  struct Offer {
    std::uint32_t engine = 0;
    std::uint8_t priority = 0;  ///< The highest that it has.
  };
  struct Choice {
    std::uint32_t engine = 0;
    /// The job of highest priority is to go, above all that its engine has under way (and above
    /// ordinary ones): it does not wait for room.
    bool urgent = false;
  };

  struct Member {
    std::string link{};        ///< That a rank's copies take.
    std::uint32_t weight = 1;  ///< Of the engine; at least that.
    bool paced_stores = false;
    bool paced_loads = false;
  };

  /// From now on. A job goes over the links of all ranks of its engine at once: engines that have
  /// one of them in common share all of theirs, and so do those that share with one of these.
  void set(std::uint32_t engine, ipc::Rank rank, const Member& member);
  /// Nothing is copied over the rank's link any more: it is shared as if the engine had no such
  /// rank. Jobs may be under way: they end where they were sent, and are in nobody's way there.
  void leave(std::uint32_t engine, ipc::Rank rank);
  /// Without jobs under way.
  void forget(std::uint32_t engine);

  [[nodiscard]] Lane lane_of(std::uint32_t engine, bool to_host) const;
  /// Nothing while there is no room: ask again when something that was sent has ended, or at
  /// next_look(), if there is one.
  /// @param offers of engines whose lane this is
  [[nodiscard]] std::optional<Choice> next(const Lane& lane,
                                           std::span<const Offer> offers,
                                           ipc::TimePoint now);
  [[nodiscard]] std::optional<ipc::TimePoint> next_look(const Lane& lane) const;
  void sent(const Lane& lane,
            std::uint32_t engine,
            std::uint64_t bytes,
            std::uint8_t priority,
            ipc::TimePoint now);
  void ended(const Lane& lane,
             std::uint32_t engine,
             std::uint64_t bytes,
             std::uint8_t priority,
             ipc::TimePoint now);

 private:
  struct Engine {
    std::map<ipc::Rank, Member> ranks{};  ///< Never none.
    std::uint32_t weight = 1;
    std::uint32_t number = 0;  ///< Of the links that it shares.
  };
  struct Use {
    double tag = 0;
    std::uint64_t bytes = 0;                       ///< Under way.
    std::map<std::uint8_t, std::uint32_t> jobs{};  ///< Under way, by priority.
    ipc::TimePoint moved{};                        ///< Began, or something of it ended.
  };
  struct State {
    double now = 0;  ///< The tag of what was sent last.
    std::uint64_t bytes = 0;
    std::uint32_t jobs = 0;
    std::map<std::uint32_t, Use> uses{};  ///< By engine.
    std::optional<ipc::TimePoint> look{};
  };

  /// Numbers what engines share; what goes on shared keeps its number.
  void regroup();
  [[nodiscard]] std::uint32_t weight_of(std::uint32_t engine) const;
  /// When an engine is passed by.
  [[nodiscard]] ipc::TimePoint loses_its_turn(const Lane& lane,
                                              std::uint32_t engine,
                                              const Use& use) const;
  [[nodiscard]] static bool has_room(const State& state, const Use& use, double share);

  std::map<std::uint32_t, Engine> engines_;
  std::uint32_t last_number_ = 0;
  std::map<Lane, State> lanes_;
};

}  // namespace kvferry::cache_manager
