// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/messages.hpp"

namespace kvferry::test {

/// List<...> of every message that has a body on a wire, parts that are sent on their own included.
template <template <typename...> typename List>
using WireMessages = List<ipc::Envelope,
                          ipc::RegistryHello,
                          ipc::RegistryWelcome,
                          ipc::RankHello,
                          ipc::RankState,
                          ipc::RankClear,
                          ipc::RankClearReply,
                          ipc::RankReinit,
                          ipc::RankReinitReply,
                          ipc::QuiesceStaging,
                          ipc::MoverItem,
                          ipc::MoverJob,
                          ipc::MoverCancel,
                          ipc::MoverJobDone,
                          ipc::EngineHello,
                          ipc::RankArena,
                          ipc::EngineState,
                          ipc::Lookup,
                          ipc::LookupReply,
                          ipc::PinRequest,
                          ipc::PinReply,
                          ipc::StoreKey,
                          ipc::ReserveStore,
                          ipc::ReservedSlot,
                          ipc::ReserveStoreReply,
                          ipc::AbandonStore,
                          ipc::StoreItem,
                          ipc::SubmitStore,
                          ipc::LoadItem,
                          ipc::SubmitLoad,
                          ipc::CancelJob,
                          ipc::SequenceBlock,
                          ipc::SwapSequence,
                          ipc::DropSequence,
                          ipc::JobDone,
                          ipc::ClearRequest,
                          ipc::RankOutcome,
                          ipc::ClearReply,
                          ipc::ReinitRequest,
                          ipc::ReinitReply,
                          ipc::StatusReply,
                          ipc::Empty,
                          ipc::SeededItem,
                          ipc::StepBlock,
                          ipc::Step,
                          ipc::StepReply,
                          ipc::AgentHello,
                          ipc::StageRequest,
                          ipc::StageReply,
                          ipc::Geometry>;

}  // namespace kvferry::test
