// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/wire/kv_event_subscriber.hpp"
#include "options.hpp"
#include "print.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

/// events: what a manager's host tier stores and removes, for people.
namespace kvferry::cli {
namespace {

using ipc::KvEventSubscriber;
using std::chrono_literals::operator""s;
using EventsJson = nlohmann::ordered_json;
using News = KvEventSubscriber::News;

std::string_view name_of(News::Kind kind) {
  switch (kind) {
    case News::Kind::kReset: return "reset";
    case News::Kind::kSnapshot: return "snapshot";
    case News::Kind::kComplete: return "complete";
    case News::Kind::kLive: return "live";
    case News::Kind::kReplayed: return "replayed";
    case News::Kind::kLost: return "lost";
  }
  return "";
}

EventsJson hashes_json(const std::vector<ipc::Digest>& hashes) {
  EventsJson list = EventsJson::array();
  for (const ipc::Digest& hash : hashes) list.push_back(hash.hex());
  return list;
}

struct EventJson {
  EventsJson operator()(const ipc::KvStored& event) const {
    EventsJson object = {
        {"type", "BlockStored"},
        {"block_hashes", hashes_json(event.hashes)},
        {"parent_block_hash",
         event.before.is_zero() ? EventsJson(nullptr) : EventsJson(event.before.hex())},
        {"block_size", event.tokens_per_block},
        {"group_idx", event.group.value}};
    if (!event.group_kind.empty()) object["kv_cache_spec_kind"] = event.group_kind;
    if (event.window_tokens != 0) object["kv_cache_spec_sliding_window"] = event.window_tokens;
    return object;
  }
  EventsJson operator()(const ipc::KvRemoved& event) const {
    return {{"type", "BlockRemoved"},
            {"block_hashes", hashes_json(event.hashes)},
            {"group_idx", event.group.value}};
  }
  EventsJson operator()(const ipc::KvCleared& /*event*/) const {
    return {{"type", "AllBlocksCleared"}};
  }
};

std::string to_json_line(const News& news) {
  EventsJson object = {{"news", name_of(news.kind)}, {"sequence", news.sequence}};
  if (news.kind == News::Kind::kLost) object["until"] = news.until;
  if (!news.topic.empty()) {
    object["topic"] = news.topic;
    object["time"] = news.batch.time;
    object["events"] = EventsJson::array();
    for (const ipc::KvEvent& event : news.batch.events) {
      object["events"].push_back(std::visit(EventJson{}, event));
    }
  }
  return object.dump(-1, ' ', false, EventsJson::error_handler_t::replace) + "\n";
}

std::string blocks_text(const std::vector<ipc::Digest>& hashes) {
  if (hashes.empty()) return "no blocks";
  if (hashes.size() == 1) return hashes.front().hex();
  return fmt::format("{} blocks, {} to {}", hashes.size(), hashes.front().hex(),
                     hashes.back().hex());
}

struct EventText {
  std::string operator()(const ipc::KvStored& event) const {
    return fmt::format(
        "stored   group {}: {}{}", event.group.value, blocks_text(event.hashes),
        event.before.is_zero() ? "" : fmt::format(", behind {}", event.before.hex()));
  }
  std::string operator()(const ipc::KvRemoved& event) const {
    return fmt::format("removed  group {}: {}", event.group.value, blocks_text(event.hashes));
  }
  std::string operator()(const ipc::KvCleared& /*event*/) const { return "cleared  all blocks"; }
};

/// What a publisher calls a topic, unless it would act on a terminal.
std::string topic_text(const std::string& topic) {
  const auto known = ipc::KvTopic::parse(topic);
  return known ? known->text() : "(a topic of another shape)";
}

std::string to_text(const News& news) {
  switch (news.kind) {
    case News::Kind::kReset: return "-- all that is stored:\n";
    case News::Kind::kComplete:
      return fmt::format("-- complete; number {} is next\n", news.sequence);
    case News::Kind::kLost:
      return fmt::format("-- lost: numbers {} to {}\n", news.sequence, news.until);
    default: break;
  }
  std::string text;
  for (const ipc::KvEvent& event : news.batch.events) {
    text += fmt::format(
        "{} {} {}\n",
        news.kind == News::Kind::kSnapshot ? std::string("-") : std::to_string(news.sequence),
        topic_text(news.topic), std::visit(EventText{}, event));
  }
  return text;
}

bool is_batch(const News& news) {
  return news.kind == News::Kind::kSnapshot || news.kind == News::Kind::kLive ||
         news.kind == News::Kind::kReplayed;
}

struct EventsOptions {
  KvEventSubscriber::Options publisher;
  bool json = false;
  std::uint64_t count = 0;  ///< Of batches; 0: no end.
  std::chrono::milliseconds time{0};
};

/// Tells people whether anybody is there.
class PresenceNotes {
 public:
  /// does: what somebody does at the endpoint; waiting: what goes on meanwhile.
  PresenceNotes(std::string endpoint, std::string_view does, std::string_view waiting)
      : endpoint_(std::move(endpoint)), does_(does), waiting_(waiting) {}

  void look(bool is_there) {
    if (told_ == is_there) return;
    const bool again = told_.has_value();
    told_ = is_there;
    was_there_ = was_there_ || is_there;
    if (!is_there) {
      print_err("kvferry events: nobody {} at {}{}; {}\n", does_, endpoint_,
                again ? " any more" : "", waiting_);
    } else if (again) {
      print_err("kvferry events: somebody {} at {}\n", does_, endpoint_);
    }
  }
  [[nodiscard]] bool was_there() const noexcept { return was_there_; }

 private:
  const std::string endpoint_;
  const std::string_view does_;
  const std::string_view waiting_;
  std::optional<bool> told_;
  bool was_there_ = false;
};

/// One command's listening.
class Listener {
 public:
  explicit Listener(const EventsOptions& options)
      : options_(options),
        subscriber_(options.publisher),
        tells_(options.publisher.endpoint, "tells", "waiting"),
        answers_(options.publisher.snapshot_endpoint,
                 "answers",
                 "what is told is kept back until what came before is known") {}

  /// All of it until an end that was asked for, or nobody reads it any more.
  void run() {
    const ipc::Deadline end = ipc::Deadline::after(options_.time);
    while (options_.count == 0 || batches_ < options_.count) {
      // Once a second: whether that was all.
      const ipc::Deadline look = ipc::Deadline::after(1s);
      const auto news = subscriber_.next(options_.time.count() == 0 ? look : look.earlier(end));
      note(news && !*news);
      if (!news) {
        print_err("kvferry events: {}\n", news.error().to_string());
      } else if (*news && !show(**news)) {
        return;
      }
      if (options_.time.count() != 0 && end.expired()) return;
    }
  }
  /// Empty, or who never was there.
  [[nodiscard]] std::string lacked() const {
    if (batches_ > 0) return {};
    if (!tells_.was_there()) {
      return fmt::format("nobody told anything at {}: is a manager there, with --kv-events?",
                         options_.publisher.endpoint);
    }
    if (asks() && !answers_.was_there()) {
      return fmt::format("nobody answered at {}: is it a manager's --kv-events-snapshot?",
                         options_.publisher.snapshot_endpoint);
    }
    return {};
  }

 private:
  [[nodiscard]] bool asks() const { return !options_.publisher.snapshot_endpoint.empty(); }
  // Not before a second was quiet: who is there needs a moment to be known.
  void note(bool was_quiet) {
    const bool connected = subscriber_.is_connected();
    if (connected || was_quiet) tells_.look(connected);
    if (asks() && !answers_.was_there() && was_quiet) answers_.look(false);
  }
  /// False when nobody reads it.
  [[nodiscard]] bool show(const News& news) {
    if (news.kind == News::Kind::kReset && asks()) answers_.look(true);
    if (is_batch(news)) ++batches_;
    return write_out(options_.json ? to_json_line(news) : to_text(news));
  }

  const EventsOptions& options_;
  KvEventSubscriber subscriber_;
  PresenceNotes tells_;
  PresenceNotes answers_;
  std::uint64_t batches_ = 0;
};

/// Returns the exit code.
int follow(const EventsOptions& options) {
  Listener listener(options);
  listener.run();
  if (const std::string lacked = listener.lacked(); !lacked.empty()) {
    print_err("kvferry events: FAILED: {}\n", lacked);
    return kExitFailed;
  }
  return stdout_complete("events") ? kExitDone : kExitFailed;
}

constexpr std::uint64_t kMostBatches = std::uint64_t{1} << 62;

void check_endpoint_option(CLI::Option& option) {
  option.type_name("ENDPOINT")->check([](const std::string& text) {
    const ipc::Status good = ipc::check_kv_endpoint(text, /*listens=*/false);
    return good ? std::string() : good.error().message;
  });
}

}  // namespace

int events_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kWarn;
  EventsOptions options;
  auto app = make_app(
      "events",
      "Shows what a manager's host memory stores and removes, as cache-aware routers are told it. "
      "With --snapshot it begins with all that is stored, and asks for what it has missed.",
      "example: a manager that was started with these endpoints\n"
      "  kvferry events --endpoint ipc:///tmp/chat-events --snapshot ipc:///tmp/chat-snapshots",
      common);
  check_endpoint_option(*app->add_option("--endpoint", options.publisher.endpoint,
                                         "Where it is told: what the manager has as --kv-events")
                             ->required());
  check_endpoint_option(*app->add_option(
      "--snapshot", options.publisher.snapshot_endpoint,
      "Where to ask for what came before: what the manager has as --kv-events-snapshot [nobody]"));
  app->add_flag("--json", options.json, "Print a JSON object per batch");
  app->add_option("--count", options.count, "End after so many batches; 0: never")
      ->type_name("N")
      ->check(CLI::Range(std::uint64_t{0}, kMostBatches))
      ->default_str("0");
  add_seconds(*app, "--seconds", options.time, "End after so long; 0: never");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("kvferry events", common.log_level);
  try {
    return follow(options);
  } catch (const ipc::Exception& exception) {
    return failure("events", exception.error());
  }
}

}  // namespace kvferry::cli
