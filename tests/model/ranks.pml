/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* Clear and re-init over two ranks (docs/architecture.md, cache_manager/src/manager/lifecycle.cpp): a commander, the
   manager, which dies and comes back, sends each rank's owner an order and aggregates what they answer. A rank fails,
   dies or stalls at any step; ranks know nothing of each other.

   Left out, and why that hides nothing:
   - The unlink handshake of a rank is one step with its results, CLEARED (after a death or not) and QUARANTINED:
     lease.pml shows that it is bounded and that they are true.
   - An attacher is told to detach as well. The owner's answer says what came of it, and lease.pml has detaches at any
     moment.
   - Quarantine is no failure of a clear: every epoch has left service; the answer names the rank's outcome.
   - A rank's owner has one order and one behind it: the connection keeps their order, and the operator waits until
     then before another operation (an engine has one at a time).
   - Orders carry the session: one of an earlier life of the rank goes with its connection.

   Bounds: NEP epochs, NOPS operations. Knobs: FAULTS how many failures in any mix, DIE_RANK DIE_COMMANDER STALL FAIL
   which there are, REST, and one M_ flag per mutant; with STEPS also WALK, AFTER, TELL and GOAL (steps.pml). */
#define FLAGS                                                                                                       \
  FLAG(FAULTS) FLAG(DIE_RANK) FLAG(DIE_COMMANDER) FLAG(STALL) FLAG(FAIL) FLAG(REST)                                 \
  FLAG(M_ignores_a_rank) FLAG(M_clear_without_epoch) FLAG(M_no_deadline) FLAG(M_waits_for_other_rank)               \
  FLAG(M_reinit_twice) FLAG(M_late_answer_counts) FLAG(M_death_unnoticed) FLAG(M_not_idempotent)                    \
  FLAG(M_quarantine_told_as_cleared) STEP_FLAGS
#define PROPERTIES                                                                                                  \
  PROPERTY(SuccessMeansEveryRank) PROPERTY(ClearsTheEpochAsked) PROPERTY(OneInitPerEpoch)                           \
  PROPERTY(ReadyMeansEveryRank) PROPERTY(SameResultAgain) PROPERTY(OutcomeIsTheRanks)                               \
  STEP_PROPERTIES
#include "common.pml"

#ifndef NEP
#define NEP 2
#endif
#ifndef NOPS
#define NOPS 4
#endif

/* ---- a rank's owner ---- */
#define R_CLEARED     0      /* nothing is mapped */
#define R_READY       1
#define R_CLEARING    2
#define R_QUARANTINED 3
byte ph[2], ep[2];           /* outlived by nothing: an owner's death starts a session without an arena */
bit live[2] = 1, stalled[2];
byte result[2];              /* of the last clear: 0 none, 1 cleared, 2 quarantined */
byte inits[2];               /* ghost: how often the present epoch was made */
byte session[2];

/* ---- messages ---- */
#define NOTHING 0
#define CLEAR   1
#define REINIT  2
byte order[2], orderep[2], orderid[2];
byte then[2], thenep[2], thenid[2];   /* the order behind it: of an operation since */
byte reply[2];               /* to the commander: 0 none, 1 ok, 2 quarantined, 3 error */
byte replyop[2];             /* to which operation */

/* ---- the commander ---- */
bit clive = 1;
byte op;                     /* what it does now */
byte opid;                   /* never used twice */
bit pending[2];
byte got[2];                 /* 0 nothing, 1 ok, 2 quarantined, 3 error */
byte askedses[2];
byte ops, faults;

#define MAY_FAULT c_expr { now.faults < FAULTS }
#define RRUNS(r)  (live[r] && !stalled[r])

#define NOT_READY(r) (!live[r] || ph[r] != R_READY)

#include "ranks_steps.pml"

/* In the order in which they were sent. */
inline next_order(r) {
  order[r] = then[r]; orderep[r] = thenep[r]; orderid[r] = thenid[r]; then[r] = NOTHING; thenep[r] = 0; thenid[r] = 0
}

inline answer_clear(r) {
  if
  :: order[r] == CLEAR && orderep[r] == ep[r] -> reply[r] = result[r]; replyop[r] = orderid[r]; next_order(r)
  :: else
  fi
}

#define CLEAR_MAY_END(r) RRUNS(r) && ph[r] == R_CLEARING && !(IF(M_waits_for_other_rank) && ph[1 - r] == R_READY)

proctype Rank(bit r) {
end:
  do
  /* Idempotent: again for an epoch that is cleared, the same result. */
  :: d_step { RRUNS(r) && order[r] == CLEAR && ph[r] != R_CLEARING ->
       if
       :: ph[r] == R_READY && (orderep[r] == ep[r] || IF(M_clear_without_epoch)) ->
            HOLD(ClearsTheEpochAsked, orderep[r] == ep[r]);
            BEGINS_CLEAR(r)
            ph[r] = R_CLEARING
       :: ph[r] != R_READY && orderep[r] == ep[r] && ep[r] > 0 ->
            reply[r] = (IF(M_not_idempotent) -> 3 : result[r]);
            HOLD(SameResultAgain, reply[r] == result[r]);
            replyop[r] = orderid[r]; next_order(r); REACHED(repeated_clear)
       :: else -> reply[r] = (ep[r] == 0 -> 1 : 3); replyop[r] = orderid[r]; next_order(r); REACHED(stale_clear)
       fi }
  /* The unlink handshake: bounded, whatever its peers do. */
  :: d_step { CLEAR_MAY_END(r) -> ENDS_CLEAR(r, 0) ph[r] = R_CLEARED; result[r] = 1; answer_clear(r) }
  :: d_step { CLEAR_MAY_END(r) ->
       ENDS_CLEAR(r, 1)
       ph[r] = R_QUARANTINED; result[r] = (IF(M_quarantine_told_as_cleared) -> 1 : 2); answer_clear(r) }
  :: d_step { RRUNS(r) && order[r] == REINIT && ph[r] != R_CLEARING ->
       if
       :: ph[r] != R_READY && orderep[r] == ep[r] + 1 ->
            ep[r]++; MAKES(r) ph[r] = R_READY; inits[r] = 1; reply[r] = 1
       :: ph[r] == R_READY && IF(M_reinit_twice) ->
            MAKES(r)
            inits[r]++; HOLD(OneInitPerEpoch, inits[r] == 1); reply[r] = 1
       :: ph[r] == R_READY && orderep[r] == ep[r] && !IF(M_reinit_twice) -> reply[r] = 1; REACHED(repeated_reinit)
       :: else -> reply[r] = 3
       fi;
       replyop[r] = orderid[r]; next_order(r) }
  :: d_step { RRUNS(r) && order[r] == REINIT && IF(FAIL) && MAY_FAULT ->
       faults++; reply[r] = 3; replyop[r] = orderid[r]; next_order(r); REACHED(reinit_failed) }
  od
}

#define RESULT_OK(r) (got[r] == 1 || got[r] == 2 || (IF(M_ignores_a_rank) && op == CLEAR && r == 1))
/* A new life of the rank began without an arena. */
#define OF_PAST_LIFE(r) (askedses[r] != session[r])
#define HAS_LET_GO(r)   (ph[r] == R_CLEARED || ph[r] == R_QUARANTINED || OF_PAST_LIFE(r))
#define TOLD_TRUE(r)                                                                                                \
  (OF_PAST_LIFE(r) || (got[r] == 1 && ph[r] == R_CLEARED) || (got[r] == 2 && ph[r] == R_QUARANTINED))

inline send(r, what, epoch) {
  if
  :: order[r] == NOTHING -> order[r] = what; orderep[r] = epoch; orderid[r] = opid
  :: else -> then[r] = what; thenep[r] = epoch; thenid[r] = opid; REACHED(behind_an_earlier_order)
  fi;
  pending[r] = 1; got[r] = 0; askedses[r] = session[r];
  TOLD(r, what, epoch) skip
}

inline end_operation() {
  if
  :: op == CLEAR && RESULT_OK(0) && RESULT_OK(1) ->
       HOLD(SuccessMeansEveryRank, HAS_LET_GO(0) && HAS_LET_GO(1));
       HOLD(OutcomeIsTheRanks, TOLD_TRUE(0) && TOLD_TRUE(1));
       TELLS(ManagerTellsCleared)
       if
       :: got[0] == 2 || got[1] == 2 -> REACHED(cleared_with_a_quarantine)
       :: else -> REACHED(all_cleared)
       fi
  :: op == CLEAR && !(RESULT_OK(0) && RESULT_OK(1)) ->
       REACHED(clear_failed);
       if
       :: (RESULT_OK(0) && !live[1]) || (RESULT_OK(1) && !live[0]) -> REACHED(one_cleared_one_died)
       :: else
       fi
  :: op == REINIT && RESULT_OK(0) && RESULT_OK(1) ->
       HOLD(ReadyMeansEveryRank, (ph[0] == R_READY || OF_PAST_LIFE(0)) && (ph[1] == R_READY || OF_PAST_LIFE(1)));
       TELLS(ManagerTellsReady)
       REACHED(all_ready)
  :: op == REINIT && !(RESULT_OK(0) && RESULT_OK(1)) -> REACHED(reinit_of_all_failed)
  fi;
  op = NOTHING; pending[0] = 0; pending[1] = 0; got[0] = 0; got[1] = 0
}

#define IS_OF_NOW(r) (replyop[r] == opid || IF(M_late_answer_counts))
#define TAKE(r)                                                                                                     \
  :: d_step { clive && reply[r] && !(op != NOTHING && pending[r] && IS_OF_NOW(r)) ->                                \
       reply[r] = 0; REACHED(stale_reply) }                                                                         \
  :: d_step { clive && op != NOTHING && pending[r] && reply[r] && IS_OF_NOW(r) ->                                   \
       TAKES_REPLY(r) got[r] = reply[r]; reply[r] = 0; pending[r] = 0 }                                             \
  :: d_step { clive && op != NOTHING && pending[r] && !live[r] && !IF(M_death_unnoticed) ->                         \
       GIVES_UP(r) got[r] = 3; pending[r] = 0; REACHED(rank_died_meanwhile) }                                       \
  :: d_step { clive && op != NOTHING && pending[r] && askedses[r] != session[r] && live[r] ->                       \
       GIVES_UP(r) got[r] = 3; pending[r] = 0 }                                                                     \
  :: d_step { clive && op != NOTHING && pending[r] && !IF(M_no_deadline) && (stalled[r] || IF(STALL)) ->            \
       GIVES_UP(r) got[r] = 3; pending[r] = 0; REACHED(deadline_passed) }

active proctype Commander() {
  atomic { run Rank(0); run Rank(1); BEGINS_LIFE(0) BEGINS_LIFE(1) REGISTERS(0) REGISTERS(1) skip };
end:
  do
  TAKE(0)
  TAKE(1)
  :: d_step { clive && op != NOTHING && !pending[0] && !pending[1] -> end_operation() }
  od
}

#define CAN_START                                                                                                   \
  (clive && op == NOTHING && c_expr { now.ops < NOPS } && live[0] && live[1] && then[0] == NOTHING &&               \
   then[1] == NOTHING)
#define FAULTS_OF(r)                                                                                                \
  :: d_step { IF(DIE_RANK) && MAY_FAULT && live[r] -> faults++; live[r] = 0; session[r]++; stalled[r] = 0;          \
       ph[r] = R_CLEARED; ep[r] = 0; result[r] = 0; inits[r] = 0; order[r] = NOTHING; then[r] = NOTHING;            \
       RANK_IS_DEAD(r) skip }                                                                                       \
  :: d_step { !live[r] -> live[r] = 1; BEGINS_LIFE(r) REGISTERS(r) REACHED(rank_restarted) }                        \
  :: d_step { IF(STALL) && MAY_FAULT && RRUNS(r) -> faults++; stalled[r] = 1 }                                      \
  :: d_step { stalled[r] -> stalled[r] = 0; REACHED(rank_continued) }

/* They were on a connection that is gone; what a rank has begun it ends. */
inline lose_orders(r) {
  order[r] = NOTHING; orderep[r] = 0; orderid[r] = 0; then[r] = NOTHING; thenep[r] = 0; thenid[r] = 0
}

active proctype Environment() {
end:
  do
  :: IF(REST) -> skip
  /* an operator */
  :: d_step { CAN_START && (ph[0] == R_READY || ph[1] == R_READY || ops > 0) ->
       op = CLEAR; opid++; ops++; send(0, CLEAR, ep[0]); send(1, CLEAR, ep[1]) }
  :: d_step { CAN_START && ep[0] < NEP && ep[1] < NEP && (ph[0] != R_READY || ph[1] != R_READY) ->
       op = REINIT; opid++; ops++;
       send(0, REINIT, ep[0] + (ph[0] == R_READY -> 0 : 1)); send(1, REINIT, ep[1] + (ph[1] == R_READY -> 0 : 1)) }
  FAULTS_OF(0)
  FAULTS_OF(1)
  :: d_step { IF(DIE_COMMANDER) && MAY_FAULT && clive ->
       faults++; clive = 0; op = NOTHING; pending[0] = 0; pending[1] = 0; got[0] = 0; got[1] = 0;
       reply[0] = 0; reply[1] = 0; lose_orders(0); lose_orders(1) }
  :: d_step { !clive -> clive = 1; NEXT_MANAGER REACHED(commander_replaced) }
  od
}

ltl OperationEnds { [] ((op != NOTHING && clive) -> <> (op == NOTHING)) }
/* Ranks do not wait for each other. */
ltl RankAlone { [] ((ph[0] == R_CLEARING && RRUNS(0)) -> <> (ph[0] != R_CLEARING || !RRUNS(0))) }
