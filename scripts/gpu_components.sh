#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: gpu_components.sh --bin DIR
#
# On a GPU: an engine of one rank whose weights are resident, offloaded as a whole or layer by layer. After an
# update from disk and one from a lender it says what the driver counts as used, with what the allocator
# caches and without, and what `kvferry components` shows; then it releases the decode graph. Fails when a
# command does, when components have anything but what their strategy leaves on the device, or when, with the
# allocator emptied, the driver counts anything but all of the weights more for resident ones.
#
#   --bin DIR  holds kvferry
# shellcheck source=gpu_engine.sh
source "$(dirname "$0")/gpu_engine.sh"

tensors=8 mib_each=64
weights_mib=$((tensors * mib_each))
# Contexts of one program differ by a few MiB, segments are of 2 MiB and more.
tolerance_mib=32
write_weights "$dir/first" "$tensors" "$mib_each"
write_weights "$dir/second" "$tensors" "$mib_each"

# Says what is used, and keeps the exact figure: without what is cached.
declare -A used
note_used() { # strategy, update
  local cached
  cached=$(used_mib)
  ask flush > /dev/null
  used[$1-$2]=$(used_mib)
  echo "   used $cached MiB after an update of $weights_mib MiB from $2, ${used[$1-$2]} MiB with the allocator emptied"
}

for strategy in resident offloaded layerwise; do
  where=(--runtime-dir "$dir/$strategy" --instance parts)
  start manager manager --host-memory 256MiB
  common=(--device cuda:0 --geometry llama-3-8b --gpu-blocks 64)
  start mover mover "${common[@]}"
  start worker worker "${common[@]}" --serve --weights "$dir/first" --weights-strategy "$strategy" --log-level info
  until_offload_ready
  echo "== $strategy: used $(used_mib) MiB after the start"
  ask pause > /dev/null
  ask update-weights --file "$dir/second" > /dev/null
  note_used "$strategy" disk
  start lender export-weights --name trainer --file "$dir/first" --device cuda:0
  until_said lends "$dir/lender.out"
  ask update-weights --from ipc --source trainer > /dev/null
  end_last
  note_used "$strategy" lender
  shown=$(ask components | awk '$2 == "weights" { print $5, $6 }')
  case $strategy in
    resident) [[ $shown == "$weights_mib.0 MiB" ]] || die "resident weights have $shown on the device" ;;
    *) [[ $shown == "0 B" ]] || die "$strategy weights have $shown on the device" ;;
  esac
  ask continue --no-empty-cache > /dev/null
  ask components --release decode_graph
  ask components --release weights | tail -n +2
  grep -h 'component weights' "$dir/worker.log" | sed 's/^/   /' || true
  end_all
done
for strategy in offloaded layerwise; do
  for update in disk lender; do
    less=$((used[resident-$update] - used[$strategy-$update]))
    ((less >= weights_mib - tolerance_mib && less <= weights_mib + tolerance_mib)) ||
      die "after an update from $update, $strategy weights leave $less MiB less with the driver's count than resident ones: $weights_mib were expected"
  done
done
