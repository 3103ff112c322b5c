#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: gpu_lent_weights.sh --bin DIR
#
# On a GPU: an engine of two ranks takes weights that another process lends in device memory, once by each
# kind of handle, then everything is released and resumed. Says what the driver counts as used after each.
# Fails when a command does, when the memory of a lender that has ended is not back, or when a release
# leaves more than the processes' contexts.
#
#   --bin DIR  holds kvferry
# shellcheck source=gpu_engine.sh
source "$(dirname "$0")/gpu_engine.sh"

write_weights "$dir/first" 1 256
write_weights "$dir/second" 1 256
where=(--runtime-dir "$dir/run" --instance lent)
say_and_ask() {
  echo "\$ kvferry $*"
  ask "$@"
}

before=$(used_mib)
start manager manager --host-memory 256MiB
for rank in 0 1; do
  common=(--rank "$rank" --ranks 2 --device cuda:0 --geometry llama-3-8b --gpu-blocks 512)
  start "mover-$rank" mover "${common[@]}"
  start "worker-$rank" worker "${common[@]}" --serve --weights "$dir/first"
done
until_offload_ready
say_and_ask pause
started=$(used_mib)
for handles in vmm legacy; do
  start "lender-$handles" export-weights --name trainer --file "$dir/second" --device cuda:0 --handles "$handles"
  until_said lends "$dir/lender-$handles.out"
  echo "used with a lender ($handles): $(used_mib) MiB"
  say_and_ask update-weights --from ipc --source trainer --empty-cache
  end_last
  echo "used after its end: $(used_mib) MiB, $started before it came"
  (($(used_mib) <= started)) || die "a lender's memory is not back"
done
say_and_ask release
released=$(used_mib)
echo "used while everything is released: $released MiB, $before before anything started"
say_and_ask resume
say_and_ask continue
echo "used after the resume: $(used_mib) MiB"
# Five processes' contexts, of which each takes about half a GiB.
((released - before < 5 * 700)) || die "a release left device memory"
