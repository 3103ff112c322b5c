/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* Which transition of the code (transitions.inc) a step of a model is; the marks of each model are in lease_steps.pml,
   hello_steps.pml, staging_steps.pml and ranks_steps.pml. They are compiled out, so that searches are the same without them, unless
   STEPS is defined. Then
   - each mark moves the machines of relation.inc, which check_transitions() uses, in the state of the model: KnownMove
     says that no other move is made, and "move ..." and "noted ..." in the output, which ones were;
   - WALK, or GOAL=MARK, in KNOBS asks for a run instead of a proof: the checker stops, and leaves a trail, AFTER
     transitions after the start, or after REACHED(MARK). With AFTER alone it is AFTER transitions after a property
     was broken: how the run of a mutant goes on;
   - with TELL each transition is printed, in a run of the trail (-r):
     STEP writer transition session epoch lease-or-job peer detail. */
#ifdef STEPS
hidden byte s_at, s_who, s_session, s_epoch, s_number, s_peer, s_detail;
hidden byte Walked;
byte after;                  /* transitions since it counts */

#define STEP(machine, transition, place, who, session, epoch, number, peer, detail)                                 \
  s_who = who; s_session = session; s_epoch = epoch; s_number = number; s_peer = peer; s_detail = detail;           \
  c_code {                                                                                                          \
    place = moved(machine_##machine, place, T_##transition);                                                        \
    if (TELL) tell(T_##transition, s_who, s_session, s_epoch, s_number, s_peer, s_detail);                          \
    if ((WALK || now.after) && now.after < 255) now.after++;                                                        \
  };                                                                                                                \
  HOLD(KnownMove, c_expr { !unknown_move });                                                                        \
  assert(Walked || c_expr { !AFTER || now.after <= AFTER });
#define IN_STEPS(text) text

c_decl {
  enum {
    T_none,
#define KVFERRY_TRANSITION(identifier, name, words) T_##identifier,
#include "transitions.inc"
    transition_count
  };
  static const char* const transition_names[] = {
    "none",
#define KVFERRY_TRANSITION(identifier, name, words) name,
#include "transitions.inc"
  };
  enum {
    machine_none,
    machine_Hello,
    machine_Owner,
    machine_Lease,
    machine_Attacher,
    machine_Registration,
    machine_Order,
    machine_EngineJob,
    machine_Job,
    machine_Part,
    machine_MoverJob,
    machine_Copy,
    machine_HandOver,
    machine_Launch
  };
  enum {
#define KVFERRY_STATE(machine, name) machine##name,
#include "relation.inc"
    state_count
  };
  static const int machine_of_state[] = {
#define KVFERRY_STATE(machine, name) machine_##machine,
#include "relation.inc"
  };
  struct move { int machine, from, transition, to; const char* text; };
  static const struct move all_moves[] = {
#define KVFERRY_MOVE(machine, from, transition, to) \
    { machine_##machine, machine##from, T_##transition, machine##to, #machine " " #from " " #transition " " #to },
#include "relation.inc"
    { 0 }
  };
  static unsigned char taken[sizeof(all_moves) / sizeof(*all_moves)], noted[transition_count];
  static int unknown_move, no_state;

  static int moved(int machine, int from, int transition) {
    const struct move* at;
    int start = 0, to;
    noted[transition] = 1;
    unknown_move = 0;
    if (machine == machine_none) return from;
    while (machine_of_state[start] != machine) start++;
    if (from < start) from = start;                    /* 0: not started */
    to = from;
    for (at = all_moves; at->machine; at++) {
      if (at->machine != machine || at->transition != transition) continue;
      to = at->to;
      if (at->from != from) continue;
      taken[at - all_moves] = 1;
      return to == start ? 0 : to;
    }
    unknown_move = 1;
    return to;
  }

  static void tell(int transition, int who, int session, int epoch, int number, int peer, int detail) {
    printf("STEP %d %s %d %d %d %d %d\n", who, transition_names[transition], session, epoch, number, peer, detail);
  }

  __attribute__((destructor)) static void report_moves(void) {
    int k;
    for (k = 0; all_moves[k].machine; k++) {
      if (taken[k]) printf("move %s\n", all_moves[k].text);
    }
    for (k = 1; k < transition_count; k++) {
      if (noted[k]) printf("noted %s\n", transition_names[k]);
    }
  }
}
#else
#define IN_STEPS(text)
#endif
