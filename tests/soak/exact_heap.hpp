// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvferry::soak {

/// Starts this program anew, once, without what the allocator keeps for threads: a cache of freed
/// blocks each, which its books count as in use and which fills for as long as a thread lives
/// (those of a connection for as long as its peer does), and arenas, which outlive their threads.
/// What then grows was not freed. Processes that are started later have an allocator as it always
/// is. Throws Exception.
void count_heap_exactly(char** argv);

}  // namespace kvferry::soak
