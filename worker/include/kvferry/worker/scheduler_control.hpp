// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// How kvferry's lifecycle commands reach an engine's scheduler; docs/lifecycle.md says what each
/// command does.
namespace kvferry::worker {

/// What a pause does to the requests that run.
enum class PauseMode : std::uint8_t {
  kAbort = 1,  ///< They end, and so do those that wait; requests that come later wait.
  kRetract,    ///< They let go of their blocks and wait again.
  kInPlace     ///< They stop and keep their blocks with what is in them.
};

/// What a scheduler has to do. Requests that hold device blocks keep the engine from being idle.
struct ScheduledWork {
  std::uint64_t running = 0;  ///< Requests that hold blocks and go on, to their end or to a stop.
  std::uint64_t frozen = 0;   ///< Requests that hold blocks and are stopped by a pause in place.
  std::uint64_t waiting = 0;  ///< Requests that hold no block.
};

/// An engine's scheduler, given to its client with ClientOptions::scheduler. kvferry never waits in
/// these calls: it looks at count() to see whether what it asked for is in effect, at each
/// Client::poll(). So poll when count() has changed.
/// A pause ends with an order to run and with nothing else: a scheduler whose client is closed
/// while paused decides for itself. The hold of a flush or an update ends when the manager or the
/// client does, for close() calls resume(); the client's destructor calls nothing.
/// @threading called from Client::poll(), close(), pause(), continue_generation(), flush() and
/// update_weights() only, on their thread. Calls of the client from here are allowed; orders that
/// come in them wait. @lifetime outlives the client.
class SchedulerControl {
 public:
  SchedulerControl() = default;
  SchedulerControl(const SchedulerControl&) = delete;
  SchedulerControl& operator=(const SchedulerControl&) = delete;
  virtual ~SchedulerControl() = default;

  /// From now on, until resume(): no request gets blocks and no step starts. What is in flight ends
  /// as ever, completions of transfers are taken as ever, and every request that held blocks
  /// becomes what the mode says once nothing of it is in flight. While held it changes the mode:
  /// in-place to retract takes the blocks of frozen requests back.
  virtual void hold(PauseMode mode) = 0;
  virtual void resume() = 0;
  [[nodiscard]] virtual ScheduledWork count() const = 0;
  /// Forgets what every block holds: prefix index and block tables.
  /// @pre held, nothing runs, is frozen or is being copied.
  virtual void reset_cache() = 0;
};

}  // namespace kvferry::worker
