#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/relation.sh [--seeds N] [--jobs N] [--preset NAME]
#
# Holds the models of hellos, of the handshake, of copy jobs and of clears over ranks (tests/model/hello.pml,
# lease.pml, staging.pml, ranks.pml), the checker of what processes record (check_transitions) and the table that all share
# (ipc/src/transitions/relation.inc) to each other; described in docs/reliability.md. Fails when
#   - a model, searched in full, makes a move that is not in the table;
#   - none ever makes one that is, and tests/model/moves.txt does not say why; or that file is wrong;
#   - the checker finds a breach in a run of a model: at random, and to each step that has to be
#     possible (tests/model/checks.txt);
#   - it finds none of the rule that tests/model/rules.txt names in the run of a mutant, or one where
#     that file says that it cannot.
#
#   --seeds N      random runs of each kind (default: 20)
#   --jobs N       processes at a time (default: the processors, at most 2)
#   --preset NAME  the build of the checker (default: release)
#   --help         this text
#
# Runs are kept under build/relation/, one line for each transition.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

readonly out=$root/build/relation table=tests/model/checks.txt
readonly memory_limit_mib=3500
# Bounds of random runs that no search could exhaust.
readonly long_bounds='-DNSES=2 -DNEP=3 -DNINC=4' long_jobs='-DNJOBS=6' long_ranks='-DNEP=8 -DNOPS=20'

# The rows of the table: name|model|bounds|knobs|expected.
rows() { # kind
  awk -F ' *[|] *' -v kind="$1" '
    $1 == kind { print $2 "|" $3 "|" $4 "|" $5 "|" $6 }' "$table"
}

directory_of() { # search|walk, model, bounds
  tr -c 'A-Za-z0-9_\n' '-' <<< "$1-$2${3// /}"
}

# A checker of the model with its transitions; one for walks takes its steps in random order.
build_one() { # search|walk, model, bounds
  local directory
  local -a bounds flags=(-O2 -w -DCOLLAPSE -DVECTORSZ=512 "-DMEMLIM=$memory_limit_mib" -DSAFETY -DNOCLAIM)
  directory=$out/$(directory_of "$1" "$2" "${3:-}")
  read -ra bounds <<< "${3:-}"
  mkdir -p "$directory"
  cp tests/model/*.pml tests/model/*.inc ipc/src/transitions/relation.inc \
    ipc/include/kvferry/ipc/transitions/transitions.inc "$directory"
  cd "$directory"
  # Walks are short: they take less time than their compiler.
  if [[ $1 == walk ]]; then flags+=(-O1 -DT_RAND -DP_RAND); fi
  spin -a -DSTEPS "${bounds[@]}" "$2.pml" > build.log 2>&1 || die "see $directory/build.log"
  gcc "${flags[@]}" -o checker pan.c >> build.log 2>&1 || die "see $directory/build.log"
  rm -f pan.[bchmtp]
}

# The whole state space, with the moves in it.
run_search() { # name, model, bounds, knobs
  local log=$out/searches/${1//[^A-Za-z0-9_-]/_}.out
  cd "$out/$(directory_of search "$2" "$3")"
  KNOBS=$4 ./checker -m2000000 > "$log" 2>&1 || true
  grep -q 'errors: 0' "$log" && grep -q '^Full statespace' "$log" &&
    ! grep -qE 'max search depth too small|out of memory|reached -DMEMLIM|Search not completed' "$log" ||
    echo "search $1: not complete, or a move that is not in the table: see $log" > "$log.failed"
}

# A run, as what its processes would have recorded.
run_walk() { # name, model, bounds, knobs, seed
  local kind=mover place checker
  place=$out/runs/${1//[^A-Za-z0-9_-]/_}
  if [[ $4 == *MOVER_OWNS* ]]; then kind=worker; fi
  if [[ $2 == staging || $2 == ranks ]]; then kind="jobs"; fi
  mkdir "$place"
  cd "$place"
  # A small table: runs are short, and a large one takes longer to clear than to use.
  checker=$out/$(directory_of walk "$2" "$3")/checker
  KNOBS=$4 "$checker" "-RS$5" -m4000 -w18 > search.out 2>&1 || true
  echo "TRACE $kind $1" > run
  if [[ -f $2.pml.trail ]]; then
    KNOBS="$4 TELL" "$checker" -r -S -m4000 -w10 2>&1 | grep '^STEP [0-9]' >> run || true
  fi
}

# All runs: name|model|bounds|knobs|seed.
walks() {
  local name model bounds knobs expected mark seed knob least
  while IFS='|' read -r name model bounds knobs expected; do
    # Two processes that have met say nothing more.
    least=15
    [[ $model != hello ]] || least=5
    for ((seed = 1; seed <= seeds; ++seed)); do
      echo "random $seed of $name|$model|$bounds|$knobs WALK AFTER=$((least + seed % (least + 1)))|$seed"
    done
    for mark in $expected; do
      for seed in 1 2; do echo "$seed to $mark of $name|$model|$bounds|$knobs GOAL=$mark AFTER=8|$seed"; done
    done
  done < <(rows search)
  for knob in '' 'LEGACY ' 'MOVER_OWNS ' 'MOVER_OWNS LEGACY '; do
    for ((seed = 1; seed <= seeds; ++seed)); do
      knobs="${knob}CHILDREN STOPS CUTS HANGS FAILS FAULTS=4"
      if ((seed % 2)); then knobs+=" CRASHES_A CRASHES_O BYES"; fi
      echo "long $seed of ${knob:-VMM }|lease|$long_bounds|$knobs WALK AFTER=$((50 + seed % 40))|$seed"
    done
  done
  for ((seed = 1; seed <= seeds; ++seed)); do
    echo "long $seed of hellos|hello||FAULTS=8 WALK AFTER=$((15 + seed))|$seed"
  done
  for ((seed = 1; seed <= 4 * seeds; ++seed)); do
    knobs='CUT_CONTROL CUT_STAGING CANCEL CLEAR HANG FAULTS=5'
    if ((seed % 2)); then knobs+=" DIE_MOVER DIE_WORKER DIE_MANAGER"; fi
    echo "long $seed of jobs|staging|$long_jobs|$knobs WALK AFTER=$((50 + seed % 70))|$seed"
  done
  for ((seed = 1; seed <= 2 * seeds; ++seed)); do
    knobs='DIE_RANK DIE_COMMANDER STALL FAIL FAULTS=6'
    if ((seed % 2)); then knobs='STALL FAIL FAULTS=2'; fi
    echo "long $seed of ranks|ranks|$long_ranks|$knobs WALK AFTER=$((50 + seed % 70))|$seed"
  done
}

# How the model goes on when a mutant has broken its property.
mutant_walks() {
  local name model bounds knobs expected after seed
  local -a more
  while IFS='|' read -r name model bounds knobs expected; do
    [[ $expected != ltl:* ]] || continue
    more=(1 12)
    if [[ $model == lease ]]; then more+=(20); fi
    # Two processes that have met say nothing more, unless one of them dies.
    if [[ $model == hello ]]; then more=(1 4) knobs+=" FAULTS=4"; fi
    for after in "${more[@]}"; do
      for seed in 1 2 3; do
        echo "mutant $name, $after $seed|$model|$bounds|$knobs ONLY=$expected AFTER=$after|$seed"
      done
    done
  done < <(rows mutant)
}

# Both directions, of moves and of transitions that move no machine.
compare_moves() {
  local wrong=0 what reason
  sed -nE 's/^KVFERRY_MOVE\(([A-Za-z]+), ([A-Za-z]+), ([A-Za-z]+), ([A-Za-z]+)\).*/move \1 \2 \3 \4/p' \
    ipc/src/transitions/relation.inc > "$out/all"
  sed -nE -e 's/^KVFERRY_TRANSITION\([A-Za-z]+, "([a-z_.]+)".*/noted \1/p' \
    -e 's/^KVFERRY_JOB_TRANSITION\([A-Za-z]+, "([a-z_.]+)".*/noted \1/p' \
    ipc/include/kvferry/ipc/transitions/transitions.inc >> "$out/all"
  grep -hE '^(move|noted) ' "$out"/searches/*.out | sort -u > "$out/taken"
  declare -A reasons=()
  while IFS='|' read -r what reason; do
    what=${what% }
    [[ -n ${reason// /} ]] || { echo "moves.txt: no reason for $what"; wrong=1; }
    reasons[$what]=$reason
    grep -qxF "$what" "$out/all" || { echo "moves.txt: there is no $what"; wrong=1; }
    ! grep -qxF "$what" "$out/taken" || { echo "moves.txt: the model has $what"; wrong=1; }
  done < <(grep -vE '^(#|$)' tests/model/moves.txt)
  while read -r what; do
    if ! grep -qxF "$what" "$out/taken"; then
      [[ -n ${reasons[$what]:-} ]] || { echo "the model never has $what"; wrong=1; }
      [[ -z ${reasons[$what]:-} ]] || echo "not in the model: $what:${reasons[$what]}"
    fi
  done < "$out/all"
  while read -r what; do
    grep -qxF "$what" "$out/all" || { echo "only the model has $what"; wrong=1; }
  done < <(grep '^move ' "$out/taken")
  echo "$(grep -c '^move ' "$out/all") moves in relation.inc, $(grep -c '^move ' "$out/taken") in the model," \
    "$(grep -c . <<< "$(printf '%s\n' "${!reasons[@]}")") listed with a reason"
  return "$wrong"
}

check_walks() {
  local wrong=0
  cat "$out"/runs/{random,1_to,2_to,long}*/run > "$out/runs.txt"
  "$steps" < "$out/runs.txt" > "$out/runs.verdict" 2> "$out/runs.log" || { tail -n 1 "$out/runs.log"; wrong=1; }
  if grep '^trace .*: [0-9]* transitions: ' "$out/runs.verdict" | grep -v ': none$'; then
    head -n 5 "$out/runs.log"
    wrong=1
  fi
  awk '/^trace/ { n++; sub(/.*: /, "", $0) } END { printf "%d runs of the model, ", n }' "$out/runs.verdict"
  echo "$(grep -c '^STEP' "$out/runs.txt") transitions: $( ((wrong)) && echo "BREACHES" || echo "no breach")"
  return "$wrong"
}

check_mutants() {
  local wrong=0 name model bounds knobs expected rule found
  cat "$out"/runs/mutant*/run > "$out/mutants.txt"
  "$steps" < "$out/mutants.txt" > "$out/mutants.verdict" 2> "$out/mutants.log" || { tail -n 1 "$out/mutants.log"; wrong=1; }
  while IFS='|' read -r name model bounds knobs expected; do
    rule=$(awk -F ' *[|] *' -v name="$name" '$1 == name { print $2 }' tests/model/rules.txt)
    found=$(grep -F "trace mutant $name, " "$out/mutants.verdict" | sed 's/.*transitions: //' | tr ' ' '\n' |
      grep -vx none | sort -u | paste -sd' ' || true)
    case $rule in
      '') echo "mutant $name: not in rules.txt"; wrong=1 ;;
      -*)
        if [[ -n $found ]]; then
          echo "mutant $name: rules.txt says that the checker cannot see it, but it finds $found"
          wrong=1
        else
          echo "mutant $name: ${expected#ltl:} of the model; not seen by the checker:${rule#-}"
        fi
        ;;
      *)
        if [[ " $found " == *" $rule "* ]]; then
          echo "mutant $name: $expected of the model, $rule of the checker"
        else
          echo "mutant $name: $rule does NOT catch it; found: ${found:-nothing}"
          wrong=1
        fi
        ;;
    esac
  done < <(rows mutant)
  while IFS='|' read -r name rule; do
    rows mutant | grep -F "${name% }|" > /dev/null || { echo "rules.txt: there is no mutant $name"; wrong=1; }
  done < <(grep -vE '^(#|$)' tests/model/rules.txt)
  return "$wrong"
}

seeds=20 preset=release jobs=$(job_count)
((jobs <= 2)) || jobs=2
while (($#)); do
  case $1 in
    --seeds | --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "$1 needs a number"
      declare "${1#--}=$2"
      shift
      ;;
    --preset)
      (($# > 1)) || die "--preset needs a name"
      preset=$2
      shift
      ;;
    # How this script calls itself, once per line of work.
    --build-one | --search-one | --walk-one)
      IFS='|' read -r -a work <<< "$2"
      case $1 in
        --build-one) build_one "${work[@]}" ;;
        --search-one) run_search "${work[@]}" ;;
        --walk-one) run_walk "${work[@]}" ;;
      esac
      exit
      ;;
    --help | -h) print_help && exit ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
  shift
done

find_tool spin > /dev/null
build_with_tests "$preset" kvferry_model_steps > /dev/null
steps=$root/build/$preset/tests/relation/kvferry_model_steps
rm -rf "$out"
mkdir -p "$out/searches" "$out/runs"

each() { xargs -P "$jobs" -d '\n' -n 1 scripts/relation.sh "$1"; }
{
  rows search | awk -F '|' '{ print "search|" $2 "|" $3; print "walk|" $2 "|" $3 }'
  rows mutant | awk -F '|' '{ print "walk|" $2 "|" $3 }'
  printf 'walk|%s\n' "lease|$long_bounds" "staging|$long_jobs" "ranks|$long_ranks"
} | sort -u | each --build-one
rows search | each --search-one
{ walks && mutant_walks; } | each --walk-one

failed=0
cat "$out"/searches/*.failed 2> /dev/null && failed=1
compare_moves || failed=1
check_walks || failed=1
check_mutants || failed=1
exit "$failed"
