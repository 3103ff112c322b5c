// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/options.hpp"

#include "probes/copy_ways/way.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <bit>
#include <cstdlib>

namespace kvferry::probes {
namespace {

constexpr std::uint64_t kLeastChunkBytes = kPieceBytes;
constexpr std::uint64_t kMostChunkBytes = kEngineCallBytes / kRegions;
constexpr std::uint64_t kGib = std::uint64_t{1} << 30U;

constexpr const char* kAbout =
    "Tries every way to take scattered blocks of a cache over the link, with nothing beside it "
    "and\n"
    "beside a decode, and tells what each reaches and what it costs the decode's tokens. A block "
    "has\n"
    "a chunk in each of 64 regions of one pitch, and lies at a random place. Each way first copies "
    "a\n"
    "pattern, which is compared byte by byte. Exits with 1 when a way failed or copied wrongly.\n";

std::string list_of_ways() {
  std::string text = "Ways:\n";
  for (const WayKind& kind : all_ways()) {
    text += fmt::format("  {:<22}{}\n", kind.name, kind.about);
  }
  text +=
      "\nWhat is a gather stays on the device, so its rate is not that of the link; what is "
      "staged\n"
      "crosses it, too.\n\nThe device is the first that is visible (CUDA_VISIBLE_DEVICES). Device "
      "memory: the "
      "largest\n"
      "arena and 5 GiB; pinned host memory: 1 GiB.";
  return text;
}

const CLI::Validator kIsChunk(
    [](std::string& text) {
      const std::uint64_t size_bytes = std::strtoull(text.c_str(), nullptr, 10);
      return std::has_single_bit(size_bytes) && size_bytes >= kLeastChunkBytes &&
                     size_bytes <= kMostChunkBytes
                 ? std::string()
                 : fmt::format("{} bytes are no power of two from {} to {}", text, kLeastChunkBytes,
                               kMostChunkBytes);
    },
    "8KiB to 128KiB");

const CLI::Validator kIsArena(
    [](std::string& text) {
      const std::uint64_t size_bytes = std::strtoull(text.c_str(), nullptr, 10);
      return size_bytes > 0 && size_bytes % kGib == 0
                 ? std::string()
                 : fmt::format("{} bytes are no whole GiB, but regions must begin on pages", text);
    },
    "whole GiB");

const CLI::Validator kIsRegex(
    [](std::string& text) -> std::string {
      try {
        const std::regex pattern(text);
        return {};
      } catch (const std::regex_error& error) {
        return fmt::format("'{}' is no regular expression: {}", text, error.what());
      }
    },
    "REGEX");

}  // namespace

Options parse_options(int argc, char** argv) {
  Options options{
      .ways = {},
      .chunk_bytes = {16384, 32768, 65536},
      .directions = {},
      .arena_bytes = {8 * kGib},
      .seconds = 0.25,
      .pace_gbps = 5,
      .json = false,
  };
  std::string ways = ".";
  std::vector<std::string> directions{"d2h", "h2d"};

  CLI::App app(kAbout);
  app.footer(list_of_ways());
  app.add_option("--ways", ways,
                 "Only ways whose name matches; one large copy is always among them")
      ->check(kIsRegex)
      ->capture_default_str();
  app.add_option("--chunk-size", options.chunk_bytes, "Sizes of a chunk (default 16,32,64KiB)")
      ->delimiter(',')
      ->check(kIsChunk)
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--direction", directions, "d2h, to host, and h2d, to the device (default both)")
      ->delimiter(',')
      ->check(CLI::IsMember({"d2h", "h2d"}));
  app.add_option("--arena", options.arena_bytes, "Sizes of the arena, whole GiB (default 8GiB)")
      ->delimiter(',')
      ->check(kIsArena)
      ->transform(CLI::AsSizeValue(false));
  app.add_option(
         "--seconds", options.seconds,
         "Time of each point beside the decode; a half of it for a point with nothing beside "
         "it, and for the tokens alone")
      ->check(CLI::Range(0.1, 60.0))
      ->capture_default_str();
  app.add_option("--pace", options.pace_gbps,
                 "GB/s of each thread block that copies straight to host memory; 0: no limit")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_flag("--json", options.json, "JSON on standard output, the table on standard error");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : 2);
  }

  options.ways = std::regex(ways);
  for (const std::string& direction : directions) {
    options.directions.push_back(direction == "d2h" ? Direction::kToHost : Direction::kToDevice);
  }
  return options;
}

}  // namespace kvferry::probes
