/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* Copy jobs over two ranks: a manager, and for each rank a mover and a worker whose staging agent runs the gathers
   and scatters that the mover asks for (docs/handshake.md, "Staged hand-overs"; cache_manager/src/mover/staged_run.cpp,
   staging_client.cpp, held_answers.cpp; cache_manager/src/manager/death_proof.cpp; worker/src/staging_agent.cpp). One
   device block, one host slot and one slot of the ring per rank; jobs one after another on all of them, so that
   whatever an earlier job left behind meets the next one.

   Who may write at a moment is a ghost: a kernel of the worker (krun) or a copy of the mover (dma). A process that
   is proven dead writes no more: the driver took its mappings before its pidfd became readable.

   Left out, and why that hides nothing:
   - A job's chunks are one: chunks have slots of their own, and a job is over when the last one is. Several jobs at a
     time are the job table's and the hazard tracker's, which have tests; here the next job starts when the one before
     is over, which is the earliest moment that its memory may be used again.
   - Both lanes are one: they share no slots and no connection.
   - Clear over the ranks is one flag: that each side unmaps only what is quiet is checked here, that the memory goes
     only then is lease.pml's, and that all ranks are told is ranks.pml's.
   - Time-outs may pass at any moment.
   - Two movers of one rank never live at once here. Where they do (a manager was replaced while one was stopped), the
     new one gets no job before the agent has ended the other's connections (settle) and nobody else holds a lease.

   Knobs
     FAULTS     how many deaths, cuts, cancellations and clears a run may have, in any mix
     DIE_MOVER DIE_WORKER DIE_MANAGER CUT_CONTROL CUT_STAGING CANCEL CLEAR HANG   which there are
     REST       the environment may rest for ever (liveness)
   and one M_ flag per mutant; with STEPS also WALK, AFTER, TELL and GOAL (steps.pml). */
#define FLAGS                                                                                                       \
  FLAG(FAULTS) FLAG(DIE_MOVER) FLAG(DIE_WORKER) FLAG(DIE_MANAGER) FLAG(CUT_CONTROL) FLAG(CUT_STAGING)               \
  FLAG(CANCEL) FLAG(CLEAR) FLAG(HANG) FLAG(REST)                                                                    \
  FLAG(M_visible_after_one_rank) FLAG(M_answer_before_copy) FLAG(M_death_without_quiesce) FLAG(M_no_fence)          \
  FLAG(M_no_barrier) FLAG(M_greets_at_once) FLAG(M_control_eof_is_death) FLAG(M_no_settle)                          \
  FLAG(M_orphans_at_once) FLAG(M_greets_manager_busy) FLAG(M_mover_unmaps_busy) FLAG(M_worker_unmaps_busy)          \
  FLAG(M_cancelled_is_done) FLAG(M_waits_for_worker) FLAG(M_lost_answer) FLAG(M_stale_answer_counts)                \
  FLAG(M_cancel_over_revoke) FLAG(M_scatter_not_awaited) FLAG(M_orphans_kept) STEP_FLAGS
#define PROPERTIES                                                                                                  \
  PROPERTY(QuietWhenGivenOn) PROPERTY(StartsWhileClaimed) PROPERTY(RingSlotQuiet)                                   \
  PROPERTY(VisibleMeansStored) PROPERTY(LoadedMeansWritten) PROPERTY(UnmappedMeansQuiet)                            \
  PROPERTY(NothingStartsAfterProof) STEP_PROPERTIES
#include "common.pml"

#ifndef NJOBS
#define NJOBS 2
#endif

/* ---- the job, as the engine and the manager have it ---- */
#define NO_JOB  0
#define RUNNING 1   /* the manager has sent it to every rank */
#define ORPHAN  2   /* its manager is lost; movers may still run it */
#define GIVEN   3   /* over: its block and its slot are given on */
byte job, jst;
bit load;                    /* to the device; otherwise a store */
bit malive = 1;
byte part[2];                /* 0 closed, 1 open */
bit partok[2];               /* closed, and without an error */

/* ---- movers ---- */
#define M_IDLE   0
#define M_QUEUED 1
#define M_ASKED  2   /* the worker has a hand-over */
#define M_COPY   3   /* its own copy is in flight */
#define M_HELD   4   /* failed, and not proven: the answer is held back */
#define M_FREE   5   /* ended; the answer is on its way */
byte ms[2], mjob[2];
bit mok[2];                  /* no error so far */
byte mstop[2];               /* why it has to stop */
#define CANCELLED 1          /* by the manager, or for its loss: nothing new starts, hand-overs are waited for */
#define REVOKED   2          /* the epoch ends: hand-overs are abandoned */
bit revoking[2];             /* its thread that holds the lease has seen the word */
bit dropped[2];              /* it has seen that its manager is lost */
bit mlive[2] = 1, mdead[2];  /* mdead: a mover has died and the manager has not dealt with it */
bit mreg[2] = 1;             /* connected to this manager */
bit asked2[2];               /* load: the copy is done, the scatter is asked for next */
byte ans[2];                 /* answer on its way: 0 none, 1 failed, 2 ok; ansjob: to which */
byte ansjob[2];
bit debt[2];                 /* kernels asked over an ended connection may still run */

/* ---- connection to the agent: 0 none, 1 hello sent, 2 greeted ---- */
byte conn[2];
bit rep[2];                  /* a reply is on its way */

/* ---- workers ---- */
#define OF_NOW  0            /* asked over this connection */
#define OF_PAST 1            /* over an ended one of this mover */
#define OF_DEAD 2            /* by a mover that is dead */
bit wlive[2] = 1;
byte wq[2], wqof[2];         /* a request that has not started: its job, and whose */
byte krun[2], kof[2];        /* a kernel that runs */
bit hung[2];                 /* a kernel that does not end */

/* ---- what the manager asked the agent to prove ---- */
byte quiesce[2];             /* of the dead mover: 0 no, 1 asked, 2 answered */
byte settle[2] = 2;          /* of all other movers, before the first job of this one */

/* ---- the arena ---- */
bit mmap[2] = 1, wmap[2] = 1, clearing;

/* ---- ghosts ---- */
bit proven[2];               /* the worker has said that nothing of the dead mover is left */
byte dma[2];                 /* job of the mover's copy in flight */
bit written[2];              /* this rank's share of the job is where it belongs */
byte faults;

#define MAY_FAULT c_expr { now.faults < FAULTS }
#define READY(r)  (mreg[r] && mlive[r] && wlive[r] && settle[r] == 2 && mmap[r] && wmap[r])
#define READY_ALL (malive && !clearing && READY(0) && READY(1))
#define QUIET(r)  (krun[r] != job && dma[r] != job)

#include "staging_steps.pml"

inline give_on() {
  HOLD(QuietWhenGivenOn, QUIET(0) && QUIET(1));
  jst = GIVEN
}

/* The last part has closed. */
inline finish_if_over() {
  if
  :: jst == RUNNING && !part[0] && !part[1] ->
       if
       :: (partok[0] && partok[1]) || (IF(M_visible_after_one_rank) && (partok[0] || partok[1])) ->
            if
            :: load -> HOLD(LoadedMeansWritten, written[0] && written[1]); REACHED(loaded)
            :: else -> HOLD(VisibleMeansStored, written[0] && written[1]); REACHED(visible)
            fi;
            IN_STEPS(job_ends(0);) skip
       :: else -> REACHED(failed) IN_STEPS(; job_ends(1))
       fi;
       give_on()
  :: else
  fi
}

inline close_part(r, ok) {
  part[r] = 0; partok[r] = ok;
  finish_if_over()
}

/* ================================================================= mover */

inline answer(r, ok) {
  MOVER_STEP(r, MoverAnswer, (ok -> 0 : 1))
  if
  :: mreg[r] && malive && !IF(M_lost_answer) -> ans[r] = (ok -> 2 : 1); ansjob[r] = mjob[r]
  :: else
  fi;
  ms[r] = M_IDLE; mjob[r] = 0; mok[r] = 0; mstop[r] = 0; asked2[r] = 0
}

/* Only mutants do: it does not wait for what it has still to do. */
inline answer_early(r) {
  MOVER_STEP(r, MoverAnswer, 0)
  ans[r] = 2; ansjob[r] = mjob[r]
}

inline ask_worker(r) {
  IN_STEPS(hand_over_at[r] = 0; asked_worker[r] = WORKER_OF(r); asking_mover[r] = MOVER_OF(r);)
  HAND_OVER_STEP(r, MoverAsk, HAND_OVER(mjob[r]))
  wq[r] = mjob[r]; wqof[r] = OF_NOW; rep[r] = 0; ms[r] = M_ASKED
}

inline start_copy(r) {
  HOLD(RingSlotQuiet, krun[r] == 0);
  HOLD(StartsWhileClaimed, mjob[r] == job && jst != GIVEN);
  COPY_STEP(r, MoverCopy)
  COPY_STEP(r, MoverCopying)
  dma[r] = mjob[r]; ms[r] = M_COPY
}

/* Closing tells the agent to drop what it has not begun. */
inline disconnect(r) {
  conn[r] = 0; rep[r] = 0;
  if
  :: wq[r] && wqof[r] == OF_NOW -> wqof[r] = OF_PAST
  :: else
  fi;
  if
  :: krun[r] && kof[r] == OF_NOW -> kof[r] = OF_PAST
  :: else
  fi
}

inline abandon(r) {
  HAND_OVER_STEP(r, MoverAbandon, 0)
  disconnect(r); debt[r] = 1;
  if
  :: IF(M_no_barrier) -> answer(r, false); debt[r] = 0
  :: else -> ms[r] = M_HELD; REACHED(held_back)
  fi
}

#define MRUNS(r) (mlive[r])

proctype Mover(bit r) {
end:
  do
  /* A connection, and the greeting without which nothing is asked. */
  :: d_step { MRUNS(r) && (ms[r] == M_QUEUED || ms[r] == M_HELD) && conn[r] == 0 && wlive[r] -> conn[r] = 1 }
  :: d_step { MRUNS(r) && conn[r] == 2 && debt[r] ->
       debt[r] = 0; IN_STEPS(debt_paid(r);) REACHED(debt_paid_by_greeting) }
  :: d_step { MRUNS(r) && debt[r] && !wlive[r] ->
       HAND_OVER_STEP(r, MoverSeesDeath, asked_worker[r])
       debt[r] = 0; REACHED(debt_paid_by_death) }

  /* One thread sees the word, another that the manager is lost. Of two reasons to stop the epoch's end counts:
     hand-overs to a worker that hangs would keep the arena. */
  :: d_step { MRUNS(r) && clearing && mmap[r] && !revoking[r] ->
       revoking[r] = 1;
       mstop[r] = (ms[r] == M_IDLE || ms[r] == M_HELD -> mstop[r] : REVOKED) }
  :: d_step { MRUNS(r) && !mreg[r] && !dropped[r] ->
       dropped[r] = 1;
       if
       :: mstop[r] == REVOKED ->
            REACHED(manager_lost_under_a_revoke);
            mstop[r] = (IF(M_cancel_over_revoke) -> CANCELLED : REVOKED)
       :: mstop[r] == 0 && ms[r] != M_IDLE && ms[r] != M_HELD -> mstop[r] = CANCELLED
       :: else
       fi }

  /* Nothing was handed over yet: stopped, or no greeting in time. */
  :: d_step { MRUNS(r) && ms[r] == M_QUEUED && mstop[r] -> answer(r, false) }
  :: d_step { MRUNS(r) && ms[r] == M_QUEUED && !mstop[r] && conn[r] != 2 ->
       MOVER_STEP(r, MoverStart, 0)
       answer(r, false) }
  :: d_step { MRUNS(r) && ms[r] == M_QUEUED && !mstop[r] && conn[r] == 2 && !debt[r] ->
       MOVER_STEP(r, MoverStart, 0)
       if
       :: load -> start_copy(r)
       :: else -> ask_worker(r)
       fi }

  :: d_step { MRUNS(r) && ms[r] == M_ASKED && rep[r] ->
       rep[r] = 0;
       HAND_OVER_STEP(r, MoverSeesHandOver, HAND_OVER(mjob[r]))
       if
       :: !mok[r] -> answer(r, false)
       :: mok[r] && load -> answer(r, true)
       :: mok[r] && !load ->
            start_copy(r);
            if
            :: IF(M_answer_before_copy) -> answer_early(r)
            :: else
            fi
       fi }
  :: d_step { MRUNS(r) && ms[r] == M_ASKED && !rep[r] && mstop[r] == REVOKED && !IF(M_waits_for_worker) ->
       abandon(r) }
  :: d_step { MRUNS(r) && ms[r] == M_ASKED && !rep[r] && (conn[r] == 0 || !wlive[r]) -> abandon(r) }

  /* The copy has been seen to end. */
  :: d_step { MRUNS(r) && ms[r] == M_COPY ->
       dma[r] = 0;
       COPY_STEP(r, MoverCopied)
       if
       :: load && IF(M_scatter_not_awaited) -> ask_worker(r); answer_early(r)
       :: load && !IF(M_scatter_not_awaited) && mstop[r] != REVOKED && conn[r] == 2 -> ask_worker(r)
       :: load && !IF(M_scatter_not_awaited) && !(mstop[r] != REVOKED && conn[r] == 2) -> answer(r, false)
       :: else -> written[r] = 1; answer(r, true)
       fi }

  :: d_step { MRUNS(r) && ms[r] == M_COPY && mstop[r] == CANCELLED && IF(M_cancelled_is_done) -> answer(r, false) }

  :: d_step { MRUNS(r) && ms[r] == M_HELD && !debt[r] -> answer(r, false) }

  /* Everything of this epoch that is ours has ended; an answer that is held back holds no memory. */
  :: d_step { MRUNS(r) && clearing && mmap[r] && (revoking[r] || IF(M_mover_unmaps_busy)) &&
              (ms[r] == M_IDLE || ms[r] == M_HELD || IF(M_mover_unmaps_busy)) ->
       HOLD(UnmappedMeansQuiet, dma[r] == 0);
       LETS_GO(MOVER_OF(r))
       mmap[r] = 0; revoking[r] = 0 }

  /* It greets a manager only when it has ended what it owed the one before. */
  :: d_step { MRUNS(r) && malive && !mreg[r] && (ms[r] == M_IDLE || IF(M_greets_manager_busy)) ->
       mreg[r] = 1; dropped[r] = 0; settle[r] = 0;
       if
       :: part[r] && !mdead[r] -> REACHED(rejoined_with_open_part); PART_STEP(r, ManagerWritesOff, 0) close_part(r, 0)
       :: else
       fi }
  od
}

/* ================================================================= worker */

proctype Worker(bit r) {
end:
  do
  :: d_step { wlive[r] && wq[r] && krun[r] == 0 && wmap[r] && !clearing ->
       HOLD(RingSlotQuiet, dma[r] == 0);
       HOLD(NothingStartsAfterProof, !(wqof[r] == OF_DEAD && proven[r]));
       HOLD(StartsWhileClaimed, wq[r] == job && jst != GIVEN);
       IN_STEPS(new_launch(r);)
       LAUNCH_STEP(r, StagingLaunch, asking_mover[r], wq[r])
       krun[r] = wq[r]; kof[r] = wqof[r]; wq[r] = 0; wqof[r] = 0 }
  /* Revoked, or the end of its connection was seen first. */
  :: d_step { wlive[r] && wq[r] && clearing ->
       if
       :: wqof[r] == OF_NOW && conn[r] == 2 ->
            mok[r] = 0; rep[r] = 1;
            IN_STEPS(new_launch(r);)
            LAUNCH_STEP(r, StagingAnswer, asking_mover[r], wq[r])
            skip
       :: else
       fi;
       wq[r] = 0; wqof[r] = 0 }
  :: d_step { wlive[r] && wq[r] && wqof[r] != OF_NOW -> wq[r] = 0; wqof[r] = 0 }
  /* The kernel has ended, and that was seen. */
  :: d_step { wlive[r] && krun[r] && !hung[r] ->
       if
       :: load && krun[r] == job -> written[r] = 1
       :: else
       fi;
       LAUNCH_STEP(r, StagingEnded, launched_mover[r], krun[r])
       if
       :: kof[r] == OF_NOW && conn[r] == 2 ->
            LAUNCH_STEP(r, StagingAnswer, launched_mover[r], krun[r])
            rep[r] = 1
       :: else
       fi;
       krun[r] = 0; kof[r] = 0 }
  /* A greeting says that nothing of the lane's past runs. The earlier connection ends by it. */
  :: d_step { wlive[r] && conn[r] == 1 && wq[r] -> wq[r] = 0; wqof[r] = 0 }
  :: d_step { wlive[r] && conn[r] == 1 && wq[r] == 0 && (krun[r] == 0 || IF(M_greets_at_once)) ->
       WORKER_NOTES(r, StagingWelcome, MOVER_OF(r))
       conn[r] = 2 }
  /* The fence first, so that nothing which the dead mover had sent can still start. */
  :: d_step { wlive[r] && quiesce[r] == 1 && wq[r] && wqof[r] == OF_DEAD && !IF(M_no_fence) ->
       wq[r] = 0; wqof[r] = 0 }
  :: d_step { wlive[r] && quiesce[r] == 1 && !(krun[r] && kof[r] == OF_DEAD) &&
              (!(wq[r] && wqof[r] == OF_DEAD) || IF(M_no_fence)) ->
       WORKER_NOTES(r, StagingQuiesced, part_mover[r])
       quiesce[r] = 2; proven[r] = 1; REACHED(quiesced) }
  :: d_step { wlive[r] && settle[r] == 1 && wq[r] && wqof[r] == OF_DEAD -> wq[r] = 0; wqof[r] = 0 }
  :: d_step { wlive[r] && settle[r] == 1 && !(krun[r] && kof[r] == OF_DEAD) && !(wq[r] && wqof[r] == OF_DEAD) ->
       WORKER_NOTES(r, StagingSettled, MOVER_OF(r))
       settle[r] = 2 }
  :: d_step { wlive[r] && clearing && wmap[r] && (krun[r] == 0 || IF(M_worker_unmaps_busy)) ->
       HOLD(UnmappedMeansQuiet, krun[r] == 0);
       LETS_GO(WORKER_OF(r))
       wmap[r] = 0 }
  od
}

/* ================================================================= manager */

/* Proven: neither that mover nor the worker on its behalf touches a block any more. */
#define DEAL_WITH_DEATH(r)                                                                                          \
  :: d_step { malive && mdead[r] && quiesce[r] == 0 && wlive[r] && part[r] && !IF(M_death_without_quiesce) ->       \
       quiesce[r] = 1 }                                                                                             \
  :: d_step { malive && mdead[r] && (quiesce[r] == 2 || !wlive[r] || !part[r] || IF(M_death_without_quiesce)) ->    \
       mdead[r] = 0; quiesce[r] = 0;                                                                                \
       if                                                                                                           \
       :: part[r] -> REACHED(part_ended_by_death); PART_STEP(r, ManagerWritesOff, 0) close_part(r, 0)                \
       :: else                                                                                                      \
       fi }                                                                                                         \
  :: d_step { malive && IF(M_control_eof_is_death) && !mreg[r] && part[r] ->                                           \
       PART_STEP(r, ManagerWritesOff, 0)                                                                            \
       close_part(r, 0) }
#define TAKE_ANSWER(r)                                                                                              \
  :: d_step { malive && ans[r] ->                                                                                   \
       if                                                                                                           \
       :: part[r] && (ansjob[r] == job || IF(M_stale_answer_counts)) ->                                             \
            PART_STEP(r, ManagerSeesEnd, (ans[r] == 2 -> 0 : 1))                                                    \
            close_part(r, (ans[r] == 2))                                                                            \
       :: else -> REACHED(stale_answer)                                                                             \
       fi;                                                                                                          \
       ans[r] = 0; ansjob[r] = 0 }
#define SETTLE(r)                                                                                                   \
  :: d_step { malive && mreg[r] && mlive[r] && wlive[r] && !mdead[r] && settle[r] == 0 ->                           \
       settle[r] = (IF(M_no_settle) -> 2 : 1) }

inline send_job(kind) {
  job++; load = kind; jst = RUNNING;
  part[0] = 1; part[1] = 1; partok[0] = 0; partok[1] = 0; written[0] = 0; written[1] = 0;
  ms[0] = M_QUEUED; ms[1] = M_QUEUED; mjob[0] = job; mjob[1] = job; mok[0] = 1; mok[1] = 1
  IN_STEPS(; job_begins())
}

active proctype Manager() {
  atomic {
    MAPS(MOVER_OF(0)) MAPS(MOVER_OF(1)) MAPS(WORKER_OF(0)) MAPS(WORKER_OF(1))
    run Mover(0); run Mover(1); run Worker(0); run Worker(1); run Environment()
  };
end:
  do
  :: d_step { READY_ALL && job < NJOBS && (jst == NO_JOB || jst == GIVEN) && ms[0] == M_IDLE && ms[1] == M_IDLE ->
       if
       :: job > 0 -> REACHED(second_job)
       :: else
       fi;
       send_job(0) }
  :: d_step { READY_ALL && job < NJOBS && (jst == NO_JOB || jst == GIVEN) && ms[0] == M_IDLE && ms[1] == M_IDLE ->
       send_job(1) }
  TAKE_ANSWER(0)
  TAKE_ANSWER(1)
  DEAL_WITH_DEATH(0)
  DEAL_WITH_DEATH(1)
  SETTLE(0)
  SETTLE(1)
  /* The engine: the jobs of a lost manager end when another one says that offload is ready. */
  :: d_step { jst == ORPHAN && (READY_ALL || IF(M_orphans_at_once)) && !IF(M_orphans_kept) ->
       REACHED(orphan_ended); ENGINE_STEP(EngineDone, 1) give_on() }
  :: d_step { clearing && !mmap[0] && !mmap[1] && !wmap[0] && !wmap[1] ->
       REACHED(cleared_and_mapped_again);
       clearing = 0; mmap[0] = mlive[0]; mmap[1] = mlive[1]; wmap[0] = wlive[0]; wmap[1] = wlive[1];
       IN_STEPS(all_map();) skip }
  od
}

/* ================================================================= environment */

inline mover_dies(r) {
  faults++;
  IN_STEPS(mover_is_dead(r);)
  if
  :: wq[r] -> wqof[r] = OF_DEAD
  :: else
  fi;
  if
  :: krun[r] -> kof[r] = OF_DEAD
  :: else
  fi;
  proven[r] = 0;
  mlive[r] = 0; mdead[r] = malive; mreg[r] = 0; conn[r] = 0; rep[r] = 0; debt[r] = 0; dma[r] = 0;
  mmap[r] = 0; ms[r] = M_IDLE; mjob[r] = 0; mok[r] = 0; mstop[r] = 0; settle[r] = 0;
  dropped[r] = 0; revoking[r] = 0
}

inline manager_dies() {
  faults++;
  malive = 0; part[0] = 0; part[1] = 0; mreg[0] = 0; mreg[1] = 0; ans[0] = 0; ans[1] = 0; ansjob[0] = 0;
  ansjob[1] = 0; mdead[0] = 0; mdead[1] = 0; quiesce[0] = 0; quiesce[1] = 0; settle[0] = 0; settle[1] = 0;
  if
  :: jst == RUNNING -> jst = ORPHAN
  :: else
  fi
}

#define FAULTS_OF(r)                                                                                                \
  :: d_step { IF(DIE_MOVER) && MAY_FAULT && mlive[r] -> mover_dies(r) }                                             \
  :: d_step { !mlive[r] -> mlive[r] = 1; mmap[r] = !clearing; IN_STEPS(next_mover(r);) REACHED(mover_replaced) }    \
  :: d_step { IF(DIE_WORKER) && MAY_FAULT && wlive[r] ->                                                            \
       faults++; IN_STEPS(worker_is_dead(r);) wlive[r] = 0; wq[r] = 0; wqof[r] = 0; krun[r] = 0; kof[r] = 0; conn[r] = 0; rep[r] = 0;            \
       settle[r] = 0; quiesce[r] = (quiesce[r] -> 2 : 0); wmap[r] = 0; hung[r] = 0;                                 \
       REACHED(worker_died) }                                                                                       \
  :: d_step { !wlive[r] -> wlive[r] = 1; wmap[r] = !clearing; IN_STEPS(next_worker(r);) skip }                      \
  :: d_step { IF(HANG) && MAY_FAULT && krun[r] && !hung[r] -> faults++; hung[r] = 1 }                               \
  :: d_step { IF(CUT_CONTROL) && MAY_FAULT && malive && mreg[r] && mlive[r] ->                                      \
       faults++; mreg[r] = 0; REACHED(control_cut) }                                                                \
  :: d_step { IF(CUT_STAGING) && MAY_FAULT && conn[r] == 2 -> faults++; disconnect(r); REACHED(staging_cut) }       \
  :: d_step { IF(CANCEL) && MAY_FAULT && ms[r] != M_IDLE && ms[r] != M_HELD && !mstop[r] ->                         \
       faults++; mstop[r] = CANCELLED; REACHED(cancelled) }

proctype Environment() {
end:
  do
  :: IF(REST) -> skip
  FAULTS_OF(0)
  FAULTS_OF(1)
  :: d_step { IF(DIE_MANAGER) && MAY_FAULT && malive -> manager_dies() }
  :: d_step { !malive -> malive = 1; IN_STEPS(next_manager();) REACHED(manager_replaced) }
  :: d_step { IF(CLEAR) && MAY_FAULT && !clearing && mmap[0] && mmap[1] && wmap[0] && wmap[1] ->
       faults++; clearing = 1;
       if
       :: jst == RUNNING -> REACHED(clear_under_a_job)
       :: else
       fi }
  od
}

/* ================================================================= liveness */

#define ALL_LIVE (malive && mlive[0] && mlive[1] && wlive[0] && wlive[1])
ltl JobsEnd     { [] ((jst == RUNNING && malive) -> <> (jst != RUNNING || hung[0] || hung[1])) }
ltl OrphansEnd  { [] ((jst == ORPHAN && ALL_LIVE) -> <> (jst != ORPHAN || !ALL_LIVE || hung[0] || hung[1])) }
/* Whatever the worker does. */
ltl DrainsAlone { [] ((clearing && mmap[0] && mlive[0]) -> <> (!mmap[0] || !mlive[0])) }
