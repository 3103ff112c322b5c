// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "host_words.hpp"
#include "kvferry/kernels/host_twins.hpp"

#include <algorithm>

namespace kvferry::kernels::host {
namespace {

void write_tokens(const StridedRegion* regions,
                  std::uint32_t region_count,
                  const DecodePass& pass,
                  const TokenWrite& write) {
  for (std::uint32_t r = 0; r < region_count; ++r) {
    const TokenBytes bytes = token_bytes(regions[r], write.block, write.first_token, write.tokens,
                                         pass.tokens_per_block);
    detail::store_words(bytes.at, bytes.size_bytes, [&](std::uint64_t i) {
      return kv_word(write.input, pass.model, regions[r].salt, i);
    });
  }
}

std::uint64_t read_tokens(const StridedRegion* regions,
                          std::uint32_t region_count,
                          const DecodePass& pass,
                          const TokenRead& read) {
  const std::uint64_t* const own = pass.model + kModelWords;
  std::uint64_t sum = 0;
  for (std::uint32_t r = 0; r < region_count; ++r) {
    const std::uint64_t salt = regions[r].salt;
    const TokenBytes bytes =
        token_bytes(regions[r], read.block, read.first_token, read.tokens, pass.tokens_per_block);
    detail::for_each_word(bytes.at, bytes.size_bytes, [&](std::uint64_t i, std::uint64_t word) {
      sum += attend_term(word, own[(i + salt) % kModelWords], read.position, salt, i);
    });
  }
  return sum;
}

}  // namespace

void decode(const StridedRegion* regions, std::uint32_t region_count, const DecodePass& pass) {
  const std::uint32_t writes = std::min(pass.counts[0], pass.max_writes);
  const std::uint32_t reads = std::min(pass.counts[1], pass.max_reads);
  for (std::uint32_t i = 0; i < writes; ++i) {
    write_tokens(regions, region_count, pass, pass.writes[i]);
  }
  for (std::uint32_t i = 0; i < reads; ++i) {
    const TokenRead& read = pass.reads[i];
    if (read.sequence >= pass.max_sequences) continue;
    pass.outputs[read.sequence] += read_tokens(regions, region_count, pass, read);
  }
}

void fold(const unsigned char* source,
          std::uint64_t size_bytes,
          std::uint64_t seed,
          std::uint64_t* sums) {
  detail::for_each_word(source, size_bytes, [&](std::uint64_t i, std::uint64_t word) {
    sums[i % kModelWords] += fold_term(word, i, seed);
  });
}

void expand(const unsigned char* source,
            std::uint64_t source_bytes,
            unsigned char* target,
            std::uint64_t target_bytes) {
  const std::uint64_t full = source_bytes / detail::kWordBytes;
  const std::uint64_t words = detail::words_of(source_bytes);
  detail::store_words(target, target_bytes, [&](std::uint64_t j) {
    const unsigned char* const at = source + j % words * detail::kWordBytes;
    const bool is_full = j % words < full;
    return expand_word(
        is_full ? detail::load_word(at) : detail::load_tail(at, source_bytes % detail::kWordBytes),
        j);
  });
}

}  // namespace kvferry::kernels::host
