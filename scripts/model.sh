#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/model.sh [--deep] [--only REGEX] [--list] [--jobs N]
#
# Model-checks the protocols (tests/model/, described in docs/reliability.md) and prints one line per
# property, per mutant and per step that was reached. Fails when
#   - a property does not hold, or has no mutant that breaks it;
#   - a mutant does not break the property named for it (no other one is looked at in its run);
#   - a step that has to be possible is never taken;
#   - a search was not exhaustive: depth, memory, or a state space that was not stored in full.
#
#   --deep         the larger bounds as well, within 24 GiB: docs/reliability.md says what each row takes
#   --only REGEX   checks whose line in --list matches
#   --list         the checks, from tests/model/checks.txt; runs none
#   --jobs N       checks at a time (default: the processors, at most 2)
#   --help         this text
#
# What each checker printed is kept under build/model/MODEL_BOUNDS_KIND/CHECK.out, with its command in
# the first line. Run in that folder, and once more with -r -v, it shows the steps that break a property.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# A checker that would need more than this has a mistake in its bounds.
readonly memory_limit_mib=3500 deep_memory_limit_mib=10000
readonly table=tests/model/checks.txt
readonly out=build/model

# Rows of the table: kind, name, model, bounds, knobs, expected.
rows() {
  awk -F ' *[|] *' -v deep="$deep" '
    function wrong(what) {
      printf "checks.txt:%d: %s\n", FNR, what > "/dev/stderr"
      bad = 1
      exit
    }
    /^#/ || NF == 0 { next }
    NF != 6 { wrong(NF " columns, expected 6") }
    $1 !~ /^(deep-)?(search|live|mutant)$/ { wrong("no kind " $1) }
    seen[$2]++ { wrong($2 " is there twice") }
    $1 ~ /^deep-/ && deep != "true" { next }
    {
      sub(/^deep-/, "", $1)
      print $1 "|" $2 "|" $3 "|" $4 "|" $5 "|" $6
    }
    END { exit bad }' "$table" | grep -E -- "$only"
}

# Of a model: its safety properties, and those of liveness.
properties_of() {
  grep -oE 'PROPERTY\([A-Z][A-Za-z]*' "tests/model/$1.pml" | sed 's/.*(//'
}

ltl_of() {
  sed -nE 's/^ltl ([A-Z][A-Za-z]*).*/\1/p' "tests/model/$1.pml"
}

is_ltl() { # kind, expected
  [[ $1 == live || $2 == ltl:* ]]
}

checker_of() { # kind, model, bounds, expected
  local what=safety
  if is_ltl "$1" "$4"; then what=live; fi
  tr -c 'A-Za-z0-9_\n' '-' <<< "$2_${3// /}_$what"
}

# Generates and compiles one checker.
build_checker() { # model, bounds, directory, memory limit
  local model=$1 bounds=$2 directory=$out/$3
  local -a defines=() flags=(-O2 -w -DCOLLAPSE -DVECTORSZ=512 "-DMEMLIM=$4")
  rm -rf "$directory"
  mkdir -p "$directory"
  cp tests/model/*.pml tests/model/*.inc "$directory"
  cd "$directory"
  read -ra defines <<< "$bounds"
  if [[ $directory == *_live ]]; then flags+=(-DNFAIR=4); else flags+=(-DSAFETY -DNOCLAIM); fi
  if ! spin -a "${defines[@]}" "$model.pml" > build.log 2>&1 || grep -q 'Error:' build.log; then
    rm -f pan.c
  else
    gcc "${flags[@]}" -o checker pan.c >> build.log 2>&1 || true
  fi
  rm -f pan.[bchmtp]
}

# What a checker's output says: "holds STATES", "broken PROPERTY" or "unfinished REASON".
verdict() {
  awk -v ltl="$2" '
    /assertion violated/ && !verdict {
      name = $0
      sub(/.*assertion violated \(+/, "", name)
      sub(/\|\|.*/, "", name)
      verdict = "broken " name
    }
    /acceptance cycle/ && /^pan/ && !verdict { verdict = "broken " ltl }
    /invalid end state/ && /^pan/ && !verdict { verdict = "broken InvalidEndState" }
    /max search depth too small|out of memory|reached -DMEMLIM|VECTORSZ is too small|^Error/ { reason = $0 }
    /Search not completed/ { cut_off = 1 }
    /^Full statespace search/ { full = 1 }
    / states, stored/ { states = $1 }
    /errors: 0/ { clean = 1 }
    END {
      if (reason) print "unfinished " reason
      else if (verdict) print verdict
      else if (clean && full && !cut_off && states) printf "holds %d\n", states
      else print "unfinished: no result"
    }' "$1"
}

# Runs one row; leaves DIRECTORY/NAME.out and DIRECTORY/NAME.verdict.
run_check() {
  local kind=$1 name=$2 model=$3 bounds=$4 knobs=$5 expected=$6 ltl="" log
  cd "$out/$(checker_of "$kind" "$model" "$bounds" "$expected")"
  log=${name//[^A-Za-z0-9_-]/_}
  if [[ ! -x checker ]]; then
    echo "unfinished: $(tail -n 1 build.log)" > "$log.verdict"
    return
  fi
  local -a options=(-m2000000)
  if is_ltl "$kind" "$expected"; then
    ltl=${expected#ltl:}
    knobs+=" REST"
    options+=(-a -f -N "$ltl")
  fi
  # A mutant breaks much. It is judged by its own property, wherever others would have stopped it.
  if [[ $kind != search ]]; then knobs+=" ONLY=${expected#ltl:}"; fi
  echo "KNOBS=\"$knobs\" ./checker ${options[*]}" > "$log.out"
  KNOBS=$knobs ./checker "${options[@]}" >> "$log.out" 2>&1 || true
  verdict "$log.out" "$ltl" > "$log.verdict"
}

# Lines about one kind of row; each counts its failures.
report_search() { # name, model, expected, directory/log, said
  local name=$1 model=$2 mark missing=0
  if [[ $5 != holds\ * ]]; then
    echo "search $name: $5"
    if [[ $5 == broken\ * ]]; then broken[$model/${5#broken }]=1; fi
    failures=$((failures + 1))
    return
  fi
  echo "search $name: complete, ${5#holds } states"
  states[$model]=$((${states[$model]:-0} + ${5#holds }))
  searches[$model]=$((${searches[$model]:-0} + 1))
  for mark in $3; do
    if grep -qx "reached: $mark" "$4.out"; then
      echo "reached $mark ($name)"
    else
      echo "never reached: $mark ($name)"
      missing=1
    fi
  done
  failures=$((failures + missing))
}

report_live() { # name, property, said
  if [[ $3 == holds\ * ]]; then
    echo "property $2 ($1): holds, ${3#holds } states"
  else
    echo "property $2 ($1): $3"
    failures=$((failures + 1))
  fi
}

report_mutant() { # name, model, expected, said
  local property=${3#ltl:}
  if [[ $4 == "broken $property" ]]; then
    echo "mutant $1: caught by $property"
    caught[$2/$property]=1
  else
    echo "mutant $1: NOT caught by $property: $4"
    failures=$((failures + 1))
  fi
}

# Safety properties over all searches of their model; and who has no mutant.
report_properties() { # model
  local property
  for property in $(properties_of "$1"); do
    if [[ -n ${broken[$1/$property]:-} ]]; then
      echo "property $property ($1): broken"
    elif [[ -n ${searches[$1]:-} ]]; then
      echo "property $property ($1): holds, ${states[$1]} states in ${searches[$1]} searches"
    fi
  done
  [[ $only == . ]] || return 0
  for property in $(properties_of "$1") $(ltl_of "$1"); do
    if [[ -z ${caught[$1/$property]:-} ]]; then
      echo "property $property ($1): no mutant breaks it"
      failures=$((failures + 1))
    fi
  done
}

report() {
  local failures=0 checks=0 kind name model bounds knobs expected log said
  local -A states=() searches=() broken=() caught=() models=()
  while IFS='|' read -r kind name model bounds knobs expected; do
    log=$out/$(checker_of "$kind" "$model" "$bounds" "$expected")/${name//[^A-Za-z0-9_-]/_}
    said=$(cat "$log.verdict" 2> /dev/null || echo "unfinished: not run")
    checks=$((checks + 1))
    models[$model]=1
    case $kind in
      search) report_search "$name" "$model" "$expected" "$log" "$said" ;;
      live) report_live "$name" "$expected" "$said" ;;
      mutant) report_mutant "$name" "$model" "$expected" "$said" ;;
    esac
  done < <(rows)
  while read -r model; do report_properties "$model"; done < <(printf '%s\n' "${!models[@]}" | sort)
  if ((failures > 0)); then
    echo "$failures failures in $checks checks"
    return 1
  fi
  echo "all $checks checks as expected"
}

deep=false
only=.
list=false
jobs=$(job_count)
((jobs <= 2)) || jobs=2
while (($#)); do
  case $1 in
    --deep) deep=true ;;
    --list) list=true ;;
    --only)
      (($# > 1)) || die "--only needs an expression"
      only=$2
      shift
      ;;
    --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--jobs needs a number"
      jobs=$2
      shift
      ;;
    # How this script calls itself, once per line of work.
    --build-one)
      IFS='|' read -r model bounds directory limit <<< "$2"
      build_checker "$model" "$bounds" "$directory" "$limit"
      exit
      ;;
    --run-one)
      IFS='|' read -r kind name model bounds knobs expected <<< "$2"
      run_check "$kind" "$name" "$model" "$bounds" "$knobs" "$expected"
      exit
      ;;
    --help | -h) print_help && exit ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
  shift
done

selected=$(rows) || die "no check matches '$only'; see --list"
if $list; then
  echo "$selected"
  exit
fi
find_tool spin > /dev/null
mkdir -p "$out"
limit=$memory_limit_mib
if $deep; then limit=$deep_memory_limit_mib; fi
while IFS='|' read -r kind name model bounds knobs expected; do
  echo "$model|$bounds|$(checker_of "$kind" "$model" "$bounds" "$expected")|$limit"
done <<< "$selected" | sort -u | xargs -P "$jobs" -d '\n' -n 1 scripts/model.sh --build-one
xargs -P "$jobs" -d '\n' -n 1 scripts/model.sh --run-one <<< "$selected"
report
