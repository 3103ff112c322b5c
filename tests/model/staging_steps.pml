/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* The marks of staging.pml (steps.pml). Each life of a process is a writer: managers from 1, movers of rank r from
   20 + 10 r, workers from 40 + 10 r; 60 is the engine. Who owns the arena is out of sight, so that movers and workers
   map it alike. What a rank has at most one of at a time (a job, a copy, a hand-over, a launch) is one machine, which
   starts anew with the next one. A job's number stands for its only hand-over, in lane 0. */
#include "steps.pml"
#ifdef STEPS
byte engine_at, job_at, part_at[2], mover_at[2], copy_at[2], hand_over_at[2], launch_at[2];

/* For the text of runs alone, which are told step by step: no part of the state. */
hidden byte manager_life, mover_life[2], worker_life[2], mapped_epoch = 1;
hidden byte part_mover[2], asked_worker[2], asking_mover[2], launched_mover[2];
hidden byte dead_mover[2], dead_worker[2]; /* whose deaths no manager has seen yet */

#define MANAGER       (1 + manager_life)
#define MOVER_OF(r)   (20 + 10 * (r) + mover_life[r])
#define WORKER_OF(r)  (40 + 10 * (r) + worker_life[r])
#define ENGINE        60
#define HAND_OVER(n)  (2 * (n))

#define ENGINE_STEP(transition, failed)                                                                             \
  STEP(EngineJob, transition, now.engine_at, ENGINE, 1, mapped_epoch, job, 0, failed)
#define JOB_STEP(transition, peer, detail)                                                                          \
  STEP(Job, transition, now.job_at, MANAGER, 1, mapped_epoch, job, peer, detail)
#define PART_STEP(r, transition, detail)                                                                            \
  s_at = r; STEP(Part, transition, now.part_at[s_at], MANAGER, 1, mapped_epoch, job, part_mover[r], detail)
#define MOVER_STEP(r, transition, detail)                                                                           \
  s_at = r; STEP(MoverJob, transition, now.mover_at[s_at], MOVER_OF(r), 1, mapped_epoch, mjob[r], 0, detail)
#define COPY_STEP(r, transition)                                                                                    \
  s_at = r; STEP(Copy, transition, now.copy_at[s_at], MOVER_OF(r), 1, mapped_epoch, mjob[r], 0, 1)
#define HAND_OVER_STEP(r, transition, detail)                                                                       \
  s_at = r; STEP(HandOver, transition, now.hand_over_at[s_at], MOVER_OF(r), 1, mapped_epoch, mjob[r], 0, detail)
#define LAUNCH_STEP(r, transition, mover, number)                                                                   \
  s_at = r;                                                                                                         \
  STEP(Launch, transition, now.launch_at[s_at], WORKER_OF(r), 1, mapped_epoch, 0, mover, HAND_OVER(number))
/* No moves. */
#define WORKER_NOTES(r, transition, mover)                                                                          \
  STEP(none, transition, no_state, WORKER_OF(r), 1, mapped_epoch, 0, mover, 0)
#define MANAGER_NOTES(transition, peer) STEP(none, transition, no_state, MANAGER, 1, mapped_epoch, job, peer, 0)
#define LEASE_NOTES(who, transition) STEP(none, transition, no_state, who, 1, mapped_epoch, who, 0, 0)

inline maps(who) {
  LEASE_NOTES(who, HelloSay) LEASE_NOTES(who, HelloWelcomed)
  LEASE_NOTES(who, AttacherAsk) LEASE_NOTES(who, AttacherGrant) LEASE_NOTES(who, AttacherImport)
  LEASE_NOTES(who, AttacherMapped)
}
inline lets_go(who) {
  LEASE_NOTES(who, AttacherDrain) LEASE_NOTES(who, AttacherDrained) LEASE_NOTES(who, AttacherUnmap)
  LEASE_NOTES(who, AttacherUnmapped) LEASE_NOTES(who, AttacherRelease) LEASE_NOTES(who, AttacherReleased)
}
#define MAPS(who)    maps(who);
#define LETS_GO(who) lets_go(who);

/* A job is sent. */
inline job_begins() {
  engine_at = 0; job_at = 0;
  ENGINE_STEP(EngineSubmit, 1)
  ENGINE_STEP(EngineSubmitted, 1)
  JOB_STEP(ManagerTake, ENGINE, job)
  part_begins(0);
  part_begins(1)
}
inline part_begins(r) {
  part_at[r] = 0; mover_at[r] = 0; copy_at[r] = 0; hand_over_at[r] = 0;
  part_mover[r] = MOVER_OF(r);
  PART_STEP(r, ManagerSend, 1)
  PART_STEP(r, ManagerSent, 1)
  MOVER_STEP(r, MoverAdmit, 1)
}
inline job_ends(failed) {
  if
  :: !load -> JOB_STEP(ManagerCommit, 0, failed)
  :: else
  fi;
  JOB_STEP(ManagerEnd, ENGINE, failed)
  MANAGER_NOTES(ManagerAnswer, ENGINE)
  ENGINE_STEP(EngineDone, failed)
}

/* Who was asked when the debt arose may have been replaced by who greets. */
inline debt_paid(r) {
  if
  :: asked_worker[r] == WORKER_OF(r) -> HAND_OVER_STEP(r, MoverProof, 0)
  :: else -> HAND_OVER_STEP(r, MoverSeesDeath, asked_worker[r])
  fi
}

inline new_launch(r) {
  launch_at[r] = 0;
  launched_mover[r] = asking_mover[r]
}

/* A death is seen by the manager at once, or by the next one. */
inline mover_is_dead(r) {
  mover_at[r] = 0; copy_at[r] = 0; hand_over_at[r] = 0;
  if
  :: malive -> MANAGER_NOTES(ManagerSeesDeath, MOVER_OF(r))
  :: else -> dead_mover[r] = MOVER_OF(r)
  fi
}
inline worker_is_dead(r) {
  launch_at[r] = 0;
  if
  :: malive -> MANAGER_NOTES(ManagerSeesDeath, WORKER_OF(r))
  :: else -> dead_worker[r] = WORKER_OF(r)
  fi
}
inline tell_deaths(r) {
  if
  :: dead_mover[r] -> MANAGER_NOTES(ManagerSeesDeath, dead_mover[r]) dead_mover[r] = 0
  :: else
  fi;
  if
  :: dead_worker[r] -> MANAGER_NOTES(ManagerSeesDeath, dead_worker[r]) dead_worker[r] = 0
  :: else
  fi
}
inline next_manager() {
  manager_life++;
  tell_deaths(0);
  tell_deaths(1)
}
inline next_mover(r) {
  mover_life[r]++;
  if
  :: mmap[r] -> MAPS(MOVER_OF(r)) skip
  :: else
  fi
}
inline next_worker(r) {
  worker_life[r]++;
  if
  :: wmap[r] -> MAPS(WORKER_OF(r)) skip
  :: else
  fi
}
inline all_map() {
  mapped_epoch++;
  map_rank(0);
  map_rank(1)
}
inline map_rank(r) {
  if
  :: mmap[r] -> MAPS(MOVER_OF(r)) skip
  :: else
  fi;
  if
  :: wmap[r] -> MAPS(WORKER_OF(r)) skip
  :: else
  fi
}
#else
#define PART_STEP(r, transition, detail)
#define MOVER_STEP(r, transition, detail)
#define COPY_STEP(r, transition)
#define HAND_OVER_STEP(r, transition, detail)
#define LAUNCH_STEP(r, transition, mover, number)
#define WORKER_NOTES(r, transition, mover)
#define ENGINE_STEP(transition, failed)
#define MAPS(who)
#define LETS_GO(who)
#endif
