/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* Which transition of the code (transitions.inc) a step of the model is. The marks are compiled out, so that searches
   are the same without them, unless STEPS is defined. Then
   - each mark moves the machines of relation.inc, which check_transitions() uses, in the state of the model: KnownMove
     says that no other move is made, and "move ..." and "noted ..." in the output, which ones were;
   - WALK, or GOAL=MARK, in KNOBS asks for a run instead of a proof: the checker stops, and leaves a trail, AFTER
     transitions after the start, or after REACHED(MARK). With AFTER alone it is AFTER transitions after a property
     was broken: how the run of a mutant goes on;
   - with TELL each transition is printed, in a run of the trail (-r): STEP writer transition session epoch lease peer.
   Owners are writers from 1, attachers from 11. */
#ifdef STEPS
hidden byte s_at, s_who, s_session, s_epoch, s_lease, s_peer;
hidden byte Walked;
byte owner_at, lease_at[NSLOT], attacher_at[NINC];
bit own_late;                /* the owner's own work outlived its drain, and was not seen to end yet */
byte after;                  /* transitions since it counts */

#define STEP(machine, transition, place, who, session, epoch, lease, peer)                                          \
  s_who = who; s_session = session; s_epoch = epoch; s_lease = lease; s_peer = peer;                                \
  c_code {                                                                                                          \
    place = moved(machine_##machine, place, T_##transition);                                                        \
    if (TELL) tell(T_##transition, s_who, s_session, s_epoch, s_lease, s_peer);                                     \
    if ((WALK || now.after) && now.after < 255) now.after++;                                                              \
  };                                                                                                                \
  HOLD(KnownMove, c_expr { !unknown_move });                                                                        \
  assert(Walked || c_expr { !AFTER || now.after <= AFTER });

#define ATTACHER(i, transition, epoch, lease)                                                                       \
  s_at = i; STEP(Attacher, transition, now.attacher_at[s_at], 11 + i, ases[i] + 1, epoch, lease, 0)
#define OWNER(transition, epoch)                                                                                    \
  STEP(Owner, transition, now.owner_at, ses + 1, ses + 1, epoch, 0, 0)
#define LEASE_OF_SLOT(k, transition)                                                                                \
  s_at = k; STEP(Lease, transition, now.lease_at[s_at], ses + 1, ses + 1, sl_ep[k], sl_id[k], 10 + sl_inc[k])
/* No moves: about what is no state of a machine. */
#define ATTACHER_NOTES(i, transition) STEP(none, transition, no_state, 11 + i, ases[i] + 1, 0, 0, 0)
#define OWNER_NOTES(transition, epoch, peer) STEP(none, transition, no_state, ses + 1, ses + 1, epoch, 0, peer)
#define IN_STEPS(text) text

/* The owner reads the words of its attachers before it does anything. */
inline see_release(k) {
  s_at = k;
  if
  :: sl_inc[k] != 0 && sl_ep[k] != 0 && ACKED(k) && c_expr { now.lease_at[s_at] == LeaseGranted } ->
       LEASE_OF_SLOT(k, OwnerSeesRelease)
  :: else
  fi
}
#define SEE_RELEASES see_release(0); see_release(1);

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
  enum { machine_none, machine_Owner, machine_Lease, machine_Attacher };
  enum { /* each machine counts from 0, where it starts */
    before_Owner = -1,
#define KVFERRY_STATE(machine, name) machine##name,
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
    int start = 0, to = from;
    noted[transition] = 1;
    unknown_move = 0;
    if (machine == machine_none) return from;
    if (machine == machine_Lease) start = LeaseNone;
    if (machine == machine_Attacher) start = AttacherIdle;
    if (from < start) from = start;                    /* 0: not started */
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

  static void tell(int transition, int who, int session, int epoch, int lease, int peer) {
    printf("STEP %d %s %d %d %d %d\n", who, transition_names[transition], session, epoch, lease, peer);
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
#define ATTACHER(i, transition, epoch, lease)
#define OWNER(transition, epoch)
#define LEASE_OF_SLOT(k, transition)
#define ATTACHER_NOTES(i, transition)
#define OWNER_NOTES(transition, epoch, peer)
#define IN_STEPS(text)
#define SEE_RELEASES
#endif
