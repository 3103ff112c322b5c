// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/stream_word.hpp"

#include <cstdint>
#include <functional>

/// How streams of host devices learn that a word was written. A GPU looks at the memory itself.
namespace kvferry::ipc::word_news {

void tell() noexcept;
/// Until the word has reached the value, or is_over says so. is_over is asked when words are
/// written, and several times a second.
void wait(const StreamWord& word, std::uint32_t at_least, const std::function<bool()>& is_over);

}  // namespace kvferry::ipc::word_news
