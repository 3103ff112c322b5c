/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* The unlink handshake of one rank (docs/handshake.md, ipc/src/lease/): lives of an owner (sessions), lives of
   attachers (incarnations) of which two may live at once, and an environment that kills, stops and continues
   processes, cuts connections, hangs drains, fails imports, clears and lets go at any step.

   How. Every process is one loop of guarded steps. A step is what the real thread does between two moments at which
   others can see it; all that it leaves behind is in the variables below, so that a death can void a process between
   any two steps. The owner's steps are whole because one lease thread does grants and clears.

   Left out, and why that hides nothing:
   - Time. A deadline may pass at any moment, or never (NO_DEADLINE), so every order of events is there.
   - Messages are flags at their receiver, taken at any later moment; a cut drops what is under way. Doorbells are not
     there at all: the words are the truth, and both sides look at them of themselves.
   - A map of slots by incarnation is NSLOT slots that are given on: an index cannot be mistaken without the mistake
     showing in SlotOfTheDead.
   - Attachers are of one kind, because an attacher's kind is not its owner's.
   - Several segments are two: one that is open and one that is not (HALF).
   - Memory of an engine (ArenaSource) is freed like legacy memory: never while somebody maps it.
   - Who maps memory besides the holders of leases (cm) is known exactly, as on the host backend. CUDA names no such
     process; what follows from that is in docs/handshake.md ("back or kept").
   - Memory that cannot be closed is a drain that never ends: a mover exits (fail_stop), a worker is STUCK for good.
   - init() that fails publishes nothing. Forged words and garbled messages end in a cut; tests show that.

   Bounds (fixed when the checker is compiled): NSES sessions of NEP epochs, NINC incarnations.
   Knobs
     MOVER_OWNS  the attachers are workers: never killed, a hung drain leaves them mapped, and they zero the
                 memory. Otherwise the attachers are movers, which acknowledge or die, and the owner zeroes.
     LEGACY      freeing under a living mapping is undefined: quarantine keeps the allocation. Otherwise memory
                 is reference-counted (VMM): quarantine drops the owner's own references.
     FAULTS      how many stops, cuts, hung drains and failed imports a run may have, in any mix
     STOPS CUTS HANGS FAILS CHILDREN CRASHES_A CRASHES_O   which faults there are; deaths need no budget
     BYES        attachers may end in the orderly way while their process lives on
     NO_DEADLINE the owner's deadlines never pass
     REST        the environment may rest for ever, so that weak fairness forces no crash: one that has to come
                 would hide a hang
   and one M_ flag per mutant; with STEPS also WALK, AFTER, TELL and GOAL (steps.pml). */
#define FLAGS                                                                                                       \
  FLAG(MOVER_OWNS) FLAG(LEGACY) FLAG(FAULTS) FLAG(STOPS) FLAG(CUTS) FLAG(HANGS) FLAG(FAILS) FLAG(CHILDREN)          \
  FLAG(CRASHES_A) FLAG(CRASHES_O) FLAG(BYES) FLAG(NO_DEADLINE) FLAG(REST)                                           \
  FLAG(M_no_wait) FLAG(M_free_at_deadline) FLAG(M_one_branch_keeps) FLAG(M_half_import_leaked)                      \
  FLAG(M_ack_before_drain) FLAG(M_ack_by_epoch) FLAG(M_stale_liveness) FLAG(M_eof_is_death)                         \
  FLAG(M_two_threads) FLAG(M_both_wait) FLAG(M_no_fail_stop) FLAG(M_slot_reused_early)                              \
  FLAG(M_lease_ids_restart) FLAG(M_pidfd_is_enough) FLAG(M_reaped_early) FLAG(M_lost_grant_kept)                    \
  FLAG(M_epoch_of_the_word) FLAG(M_own_use_ignored) FLAG(M_next_epoch_in_own_use) FLAG(M_worker_killed)             \
  FLAG(M_search_first) FLAG(M_parked_forgotten) FLAG(M_unprepared_served) FLAG(M_prepared_not_read)                 \
  FLAG(M_two_workers) FLAG(M_child_writes_on) FLAG(M_same_epoch_again) FLAG(M_bye_gives_up)                         \
  FLAG(M_owner_loss_unnoticed) FLAG(M_word_not_read) FLAG(M_detached_epoch_taken) STEP_FLAGS
#define PROPERTIES                                                                                                  \
  PROPERTY(FreedWhileMapped) PROPERTY(GrantedEpoch) PROPERTY(NoGrantAfterRevoke)                                    \
  PROPERTY(AckedMeansUnmapped) PROPERTY(ClearedMeansEnded) PROPERTY(ClearedMeansBack)                               \
  PROPERTY(QuarantineEndsWithMemoryBack) PROPERTY(OwnUseEnded) PROPERTY(OneEpochOfOwnUse)                           \
  PROPERTY(GrantNotAckedYet) PROPERTY(SlotOfTheDead) PROPERTY(WordMoves)                                            \
  PROPERTY(HoldsNothingWhileSearching) PROPERTY(WorkersNeverKilled) PROPERTY(ServedZeroed)                          \
  PROPERTY(KeptOnceServed) PROPERTY(OneWorkerAtATime) PROPERTY(AsksWithNoLease)                                     \
  PROPERTY(ByeLeavesNoLease) PROPERTY(NothingBelowTheAsked) STEP_PROPERTIES
#include "common.pml"

/* Phases of the owner word. */
#define Vacant      0
#define Ready       1
#define Revoking    2
#define Cleared     3
#define Quarantined 4
#define Shutdown    5
c_decl {
#define PHASE(name, value) _Static_assert(name == value, #name);
#include "phases.inc"
}

/* Where an attacher is. */
#define OFF       0   /* not started */
#define DEAD      1   /* and its pidfd is readable */
#define SEARCH    2   /* looks for an owner, holds nothing */
#define HELLO     3   /* has said hello, waits for the welcome */
#define IDLE      4   /* connected, asks next */
#define WAITING   5   /* has asked for an epoch */
#define IMPORTING 6   /* takes the grant: nothing is open yet */
#define HALF      7   /* one segment is open, another is not */
#define ZEROING   8   /* a worker that got memory which nobody has zeroed */
#define MAPPED    9
#define DRAINING  10  /* its own copies are in flight */
#define HUNG      11  /* they do not end in time */
#define STUCK     12  /* a worker stays mapped until they do */
#define CLOSING   13  /* drained, still mapped */
#define CLOSED    14  /* every segment is closed, not said yet */
#define LEAVING   15  /* holds nothing, has said bye, waits for the answer */
#define GONE      16  /* ended in the orderly way; its process lives on */

/* Stages of a clear. */
#define NONE      0
#define LEASES    1
#define KILLING   2
#define UNMAPPING 3
#define SETTLING  4

/* ---- shared words ---- */
byte owp[NSES], owe[NSES];   /* the owner word: phase and epoch; one word, written in one step; outlives its writer */
byte rel[NINC];              /* released: in the words that the owner has of this incarnation */
byte prep;                   /* prepared, a bit per incarnation: it zeroed the epoch of its last lease */

/* ---- connections: one per incarnation ---- */
byte conn[NINC];             /* 0 none, 1 hello on its way, 2 welcome on its way, 3 open, 4 bye, 5 its answer */
byte want[NINC];             /* attach request at the owner: smallest epoch; parked while there is none */
byte gep[NINC], gid[NINC];   /* the grant, on its way or held: epoch and lease id */
byte gprep;                  /* bit per incarnation: the grant says that the epoch is prepared */
byte cut;                    /* bit per incarnation: broken, and the attacher has not seen it */

/* ---- attachers ---- */
byte ast[NINC];
byte ases[NINC];             /* session that it is or was connected to */
byte minep[NINC];
byte astop;                  /* bit per incarnation: SIGSTOP */
byte akill;                  /* bit per incarnation: SIGKILL sent, not dead yet */
byte incs;                   /* incarnations started so far */

/* ---- the living owner: its private state goes with it ---- */
byte ses;
bit oalive = 1, ostop;
byte stage, deaths;          /* of the clear; epochs that somebody died on, as bits */
byte seq;                    /* last lease id */
#define NSLOT 2
byte sl_inc[NSLOT];          /* holder + 1; 0: free */
byte sl_ep[NSLOT], sl_id[NSLOT], sl_last[NSLOT];
byte mark;                   /* of the current epoch: unprepared, being prepared by incarnation mark - 1, prepared */
#define UNPREPARED 0
#define PREPARED   15
bit ownstuck;                /* its own work on the current epoch has not ended */
byte quar, quar_own;         /* quarantined epochs, as bits; the one that its own work still uses */
byte granting;               /* of a mutant: a grant that is decided and not recorded */

/* ---- memory: one per session and epoch ---- */
byte om;                     /* mapped (allocated) by the owner */
byte am[NINC];               /* mapped by an incarnation */
byte cm;                     /* mapped by a forked child of a dead incarnation */
byte zeroed;                 /* ghost: a worker zeroed it whole, and it may hold data since */

byte faults;

#define MEM(s, e)  (1 << ((s) * NEP + (e) - 1))
#define EP(e)      (1 << (e))
#define BIT(i)     (1 << (i))
#define LIVES(i)   (ast[i] > DEAD)
#define RUNS(i)    (LIVES(i) && !(astop & BIT(i)))
#define ORUNS      (oalive && !ostop)
#define LOST(i)    (!oalive || ases[i] != ses || (cut & BIT(i)))
#define CURRENT(i) (owp[ases[i]] == Ready && owe[ases[i]] == gep[i])
#define MAY_FAULT  c_expr { now.faults < FAULTS }
#define GMEM(i)    MEM(ases[i], gep[i])
#define OMEM       MEM(ses, owe[ses])

#if NINC == 2
#define EACH(S)      S(0) S(1)
#define ALL_OF(P, x) (P(0, x) && P(1, x))
#define SUM(P)       (P(0) + P(1))
#elif NINC == 3
#define EACH(S)      S(0) S(1) S(2)
#define ALL_OF(P, x) (P(0, x) && P(1, x) && P(2, x))
#define SUM(P)       (P(0) + P(1) + P(2))
#else
#define EACH(S)      S(0) S(1) S(2) S(3)
#define ALL_OF(P, x) (P(0, x) && P(1, x) && P(2, x) && P(3, x))
#define SUM(P)       (P(0) + P(1) + P(2) + P(3))
#endif

/* ---- what the owner knows of its slots ---- */
#define HOLDER(k)    (sl_inc[k] - 1)
#define IN(k, i)     (sl_inc[k] == (i) + 1)
#define SLOT_FREE(k) (sl_inc[k] == 0)
#define DEAD_VIEW(i) (ast[i] == DEAD || (IF(M_stale_liveness) && ast[0] == DEAD) ||                                 \
                      (IF(M_eof_is_death) && (conn[i] == 0 || (cut & BIT(i)))))
#define ACKED(k)     (rel[HOLDER(k)] >= (IF(M_ack_by_epoch) -> sl_ep[k] : sl_id[k]))
/* A dead holder counts until its death has been dealt with. */
#define LEASE(k)     (sl_inc[k] != 0 && sl_ep[k] != 0 && !ACKED(k))
#define HOLDS(k, e)  (LEASE(k) && sl_ep[k] == (e))
#define ENDED(e)     (!HOLDS(0, e) && !HOLDS(1, e))
#define LEASE_OF(i)  ((IN(0, i) && LEASE(0)) || (IN(1, i) && LEASE(1)))

/* ---- ghosts: what is true, whoever knows it ---- */
#define MAPS_NOT(i, m)      (!LIVES(i) || !(am[i] & (m)))
#define NO_ATTACHER_MAPS(m) ALL_OF(MAPS_NOT, m)
#define BACK(m)             (!(om & (m)) && NO_ATTACHER_MAPS(m) && !(cm & (m)))
/* No grant of the epoch is with it or on its way to it. */
#define HOLDS_NOT(i, e)     (!LIVES(i) || ases[i] != ses || gep[i] != (e))
#define OTHER_MAPS_NOT(i, me) ((i) == (me) || MAPS_NOT(i, GMEM(me)))

#include "lease_steps.pml"

inline publish(phase, epoch) {
#define MOVE(from, to, epoch_step) || (owp[ses] == from && phase == to && epoch == owe[ses] + epoch_step)
  assert(WordMoves || c_expr { skip_WordMoves } || false
#include "phases.inc"
  );
  owp[ses] = phase;
  owe[ses] = epoch
}

/* The one free of the owner's side. Memory that may be used again is memory that no living peer maps, or is about
   to map: it has a grant. */
inline free_now(epoch) {
  HOLD(FreedWhileMapped, NO_ATTACHER_MAPS(MEM(ses, epoch)) && ALL_OF(HOLDS_NOT, epoch) &&
                             !(IF(LEGACY) && (cm & MEM(ses, epoch))));
  HOLD(OwnUseEnded, !(quar_own & EP(epoch)) && !(ownstuck && epoch == owe[ses]));
  om = om & ~MEM(ses, epoch)
}

inline free_epoch() {
  OWNER(OwnerFree, owe[ses])
  free_now(owe[ses]);
  OWNER(OwnerFreed, owe[ses])
  skip
}

inline end_clear(phase) {
  if
  :: phase == Cleared ->
       OWNER(OwnerCleared, owe[ses])
       HOLD(ClearedMeansEnded, ENDED(owe[ses]) && ALL_OF(HOLDS_NOT, owe[ses]));
       HOLD(ClearedMeansBack, BACK(OMEM));
       if
       :: deaths & EP(owe[ses]) -> REACHED(cleared_peer_dead)
       :: else -> REACHED(cleared)
       fi;
       deaths = deaths & ~EP(owe[ses])
  :: else -> OWNER(OwnerQuarantined, owe[ses]) REACHED(quarantined)
  fi;
  stage = NONE; mark = UNPREPARED;
  publish(phase, owe[ses]);
  OWNER(OwnerPublished, owe[ses])
  skip
}

/* What outlived its drain has ended after all, and the owner has asked once more. */
inline see_own_end() {
#ifdef STEPS
  if
  :: own_late && !ownstuck -> own_late = 0; OWNER(OwnerDrained, owe[ses])
  :: else
  fi
#else
  skip
#endif
}

inline quarantine() {
  see_own_end();
  OWNER(OwnerKeep, owe[ses])
  IN_STEPS(own_late = 0;)
  quar = quar | EP(owe[ses]);
  if
  :: ownstuck -> quar_own = quar_own | EP(owe[ses]); ownstuck = 0; REACHED(quarantined_own_use)
  :: !ownstuck && IF(LEGACY)
  :: !ownstuck && !IF(LEGACY) -> om = om & ~OMEM       /* our references go, the rest comes back later */
  fi;
  end_clear(Quarantined)
}

/* All leases have ended. After a death a forked child may still map the memory. */
inline free_arena() {
  if
  :: ownstuck && !IF(M_own_use_ignored) -> quarantine()
  :: else ->
       see_own_end();
       if
       :: !(deaths & EP(owe[ses])) || IF(M_pidfd_is_enough) -> free_epoch(); end_clear(Cleared)
       :: else ->
            if
            :: IF(LEGACY) && (cm & OMEM) -> stage = UNMAPPING
            :: else -> free_epoch(); stage = SETTLING
            fi
       fi
  fi
}

/* ================================================================= attacher */

inline acknowledge(i) {
  ATTACHER(i, AttacherRelease, 0, gid[i])
  HOLD(AckedMeansUnmapped, am[i] == 0);
  if
  :: ases[i] == ses && oalive -> rel[i] = (IF(M_ack_by_epoch) -> gep[i] : gid[i])
  :: else                                              /* the words of a dead session are nobody's */
  fi;
  ATTACHER(i, AttacherReleased, 0, gid[i])
  skip
}

/* A lease whose grant never came. */
inline return_unopened(i, lease) {
  ATTACHER(i, AttacherReturn, 0, lease)
  ATTACHER(i, AttacherRelease, 0, lease)
  rel[i] = lease;
  ATTACHER(i, AttacherReleased, 0, lease)
  skip
}

inline disconnect(i) {
#ifdef STEPS
  if
  :: !oalive || ases[i] != ses -> ATTACHER_NOTES(i, AttacherSeesDeath)
  :: else
  fi;
#endif
  IN_STEPS(hello_at[i] = 0;)
  conn[i] = 0; want[i] = 0; gep[i] = 0; gid[i] = 0; cut = cut & ~BIT(i); gprep = gprep & ~BIT(i);
  ast[i] = SEARCH
}

/* Its words stay: the owner reads them until the process is dead. */
inline leave(i) {
  HOLD(ByeLeavesNoLease, !oalive || ases[i] != ses || !LEASE_OF(i));
  IN_STEPS(hello_at[i] = 0;)
  conn[i] = 0; want[i] = 0; gep[i] = 0; gid[i] = 0; cut = cut & ~BIT(i); gprep = gprep & ~BIT(i);
  ast[i] = GONE
}

/* A forked child keeps what its parent had mapped at its death: nobody closed it. */
inline die(i, leaves_child) {
  if
  :: leaves_child -> cm = cm | am[i]
  :: else
  fi;
  IN_STEPS(attacher_at[i] = 0; hello_at[i] = 0;)
  am[i] = 0; ast[i] = DEAD; ases[i] = 0; minep[i] = 0; conn[i] = 0; want[i] = 0; gep[i] = 0; gid[i] = 0;
  cut = cut & ~BIT(i); astop = astop & ~BIT(i); akill = akill & ~BIT(i); gprep = gprep & ~BIT(i)
}

/* Its user has the epoch. */
inline begin_to_use(i) {
  HOLD(ServedZeroed, zeroed & GMEM(i));
  ast[i] = MAPPED; REACHED(mapped);
  if
  :: i > 1 -> REACHED(third_life_mapped)
  :: else
  fi;
  if
  :: am[0] && am[1] && ast[0] == MAPPED && ast[1] == MAPPED && am[0] == am[1] -> REACHED(two_mapped_one_epoch)
  :: am[0] && am[1] && am[0] != am[1] -> REACHED(two_mapped_two_epochs)
  :: else
  fi
}

#ifdef STEPS
/* An import that fails closes what it had opened, and says so at the end. */
inline close_begins(i) {
  s_at = i;
  if
  :: c_expr { now.attacher_at[s_at] == AttacherOpening }
  :: else -> ATTACHER(i, AttacherUnmap, gep[i], gid[i]) skip
  fi
}
inline close_ended(i) {
  s_at = i;
  if
  :: c_expr { now.attacher_at[s_at] == AttacherOpening } -> ATTACHER(i, AttacherFailed, gep[i], gid[i]) skip
  :: else -> ATTACHER(i, AttacherUnmapped, gep[i], gid[i]) skip
  fi
}
#endif

active [NINC] proctype Attacher() {
end:
  do
  :: d_step { RUNS(_pid) && ast[_pid] == SEARCH && oalive && owp[ses] != Shutdown ->
       HOLD(HoldsNothingWhileSearching, am[_pid] == 0);
       if
       :: ases[_pid] != ses -> minep[_pid] = 1; IN_STEPS(attacher_at[_pid] = 0)
       :: else
       fi;
       SAYS_HELLO(_pid) ases[_pid] = ses; conn[_pid] = 1; ast[_pid] = HELLO }

  /* Nothing is mapped here, so a grant that was lost on its way is let go of already. */
  :: d_step { RUNS(_pid) && ast[_pid] == HELLO && conn[_pid] == 2 && !LOST(_pid) ->
       if
       :: IF(M_lost_grant_kept)
       :: else ->
            if
            :: IN(0, _pid) && sl_last[0] > rel[_pid] ->
                 return_unopened(_pid, sl_last[0]); REACHED(lost_grant_acknowledged)
            :: IN(1, _pid) && sl_last[1] > rel[_pid] ->
                 return_unopened(_pid, sl_last[1]); REACHED(lost_grant_acknowledged)
            :: else
            fi
       fi;
       IS_WELCOME(_pid) conn[_pid] = 3; ast[_pid] = IDLE }

  :: d_step { RUNS(_pid) && ast[_pid] == IDLE && minep[_pid] <= NEP && !LOST(_pid) ->
       HOLD(AsksWithNoLease, !LEASE_OF(_pid));         /* the owner would end the connection */
       ATTACHER(_pid, AttacherAsk, minep[_pid], 0)
       want[_pid] = minep[_pid]; ast[_pid] = WAITING;
       ATTACHER(_pid, AttacherAsked, minep[_pid], 0)
       skip }

  :: d_step { RUNS(_pid) && ast[_pid] == WAITING && gep[_pid] != 0 ->
       ATTACHER(_pid, AttacherGrant, gep[_pid], gid[_pid])
       if
       :: CURRENT(_pid) && (gep[_pid] >= minep[_pid] || IF(M_detached_epoch_taken)) -> ast[_pid] = IMPORTING
       :: else ->
            if
            :: CURRENT(_pid) -> REACHED(given_back_after_detach)
            :: else -> REACHED(given_back_unopened)
            fi;
            if
            :: !CURRENT(_pid) && minep[_pid] <= gep[_pid] -> minep[_pid] = gep[_pid] + 1
            :: else
            fi;
            ATTACHER(_pid, AttacherReturn, gep[_pid], gid[_pid])
            acknowledge(_pid); gep[_pid] = 0; gid[_pid] = 0; gprep = gprep & ~BIT(_pid); ast[_pid] = IDLE
       fi }

  :: d_step { RUNS(_pid) && ast[_pid] == IMPORTING ->
       if
       :: IF(M_epoch_of_the_word) -> gep[_pid] = owe[ases[_pid]]
       :: else
       fi;
       ATTACHER(_pid, AttacherImport, gep[_pid], gid[_pid])
       HOLD(GrantedEpoch, LOST(_pid) || (IN(0, _pid) && sl_id[0] == gid[_pid] && sl_ep[0] == gep[_pid]) ||
                              (IN(1, _pid) && sl_id[1] == gid[_pid] && sl_ep[1] == gep[_pid]));
       HOLD(NothingBelowTheAsked, gep[_pid] >= minep[_pid]);
       /* Two workers would write to the same blocks. */
       HOLD(OneWorkerAtATime, !IF(MOVER_OWNS) || (ALL_OF(OTHER_MAPS_NOT, _pid) && !(cm & GMEM(_pid))));
       am[_pid] = am[_pid] | GMEM(_pid); ast[_pid] = HALF }

  :: d_step { RUNS(_pid) && ast[_pid] == HALF ->
       ATTACHER(_pid, AttacherMapped, gep[_pid], gid[_pid])
       if
       :: IF(MOVER_OWNS) && !(gprep & BIT(_pid)) ->
            HOLD(KeptOnceServed, !(zeroed & GMEM(_pid))); ast[_pid] = ZEROING
       :: else -> begin_to_use(_pid)
       fi }
  /* The mark is stored strictly after the end of the zeroing was observed. */
  :: d_step { RUNS(_pid) && ast[_pid] == ZEROING ->
       HOLD(KeptOnceServed, !(zeroed & GMEM(_pid)));
       zeroed = zeroed | GMEM(_pid);
       if
       :: oalive && ases[_pid] == ses -> prep = prep | BIT(_pid)
       :: else
       fi;
       begin_to_use(_pid); REACHED(zeroed_by_worker) }
  /* The same epoch again, once all is closed. */
  :: d_step { RUNS(_pid) && (ast[_pid] == HALF || ast[_pid] == ZEROING) && IF(FAILS) && MAY_FAULT ->
       faults++;
       REACHED(half_import_failed);
#ifdef STEPS
       if
       :: ast[_pid] == ZEROING ->                      /* its user refuses it */
            ATTACHER(_pid, AttacherDrain, gep[_pid], gid[_pid])
            ATTACHER(_pid, AttacherDrained, gep[_pid], gid[_pid])
            skip
       :: ast[_pid] == HALF && IF(M_half_import_leaked) -> ATTACHER(_pid, AttacherFailed, gep[_pid], gid[_pid]) skip
       :: else
       fi;
#endif
       ast[_pid] = (IF(M_half_import_leaked) -> CLOSED : CLOSING) }

  :: d_step { RUNS(_pid) && ast[_pid] == MAPPED &&
              ((!CURRENT(_pid) && !IF(M_word_not_read)) || (LOST(_pid) && !IF(M_owner_loss_unnoticed))) ->
       if
       :: !CURRENT(_pid) -> minep[_pid] = gep[_pid] + 1
       :: else
       fi;
       if
       :: !oalive || ases[_pid] != ses -> REACHED(owner_lost_while_mapped)
       :: oalive && ases[_pid] == ses && (cut & BIT(_pid)) -> REACHED(connection_lost_while_mapped)
       :: else
       fi;
       if
       :: IF(M_ack_before_drain) -> acknowledge(_pid)
       :: else
       fi;
       if
       :: IF(M_search_first) && LOST(_pid) -> disconnect(_pid)
       :: else -> ATTACHER(_pid, AttacherDrain, gep[_pid], gid[_pid]) ast[_pid] = DRAINING
       fi }

  :: d_step { RUNS(_pid) && ast[_pid] == DRAINING && !(IF(M_both_wait) && owp[ases[_pid]] == Revoking) ->
       ATTACHER(_pid, AttacherDrained, gep[_pid], gid[_pid])
       ast[_pid] = CLOSING }
  :: d_step { RUNS(_pid) && ast[_pid] == DRAINING && IF(HANGS) && MAY_FAULT -> faults++; ast[_pid] = HUNG }
  :: d_step { RUNS(_pid) && ast[_pid] == HUNG && IF(MOVER_OWNS) ->
       ATTACHER(_pid, AttacherStuck, gep[_pid], gid[_pid])
       ast[_pid] = STUCK }
  :: d_step { RUNS(_pid) && ast[_pid] == HUNG && !IF(MOVER_OWNS) && !IF(M_no_fail_stop) ->
       ATTACHER(_pid, AttacherStuck, gep[_pid], gid[_pid])
       REACHED(fail_stop); die(_pid, false) }

  :: d_step { RUNS(_pid) && ast[_pid] == CLOSING ->
       IN_STEPS(close_begins(_pid);)
       am[_pid] = am[_pid] & ~GMEM(_pid); ast[_pid] = CLOSED
       IN_STEPS(; close_ended(_pid)) }
  :: d_step { RUNS(_pid) && ast[_pid] == CLOSING && IF(M_one_branch_keeps) -> ast[_pid] = CLOSED }

  /* Strictly after the last close. */
  :: d_step { RUNS(_pid) && ast[_pid] == CLOSED ->
       acknowledge(_pid); gep[_pid] = 0; gid[_pid] = 0; gprep = gprep & ~BIT(_pid);
       if
       :: LOST(_pid) -> disconnect(_pid)
       :: else -> ast[_pid] = IDLE
       fi }

  /* The orderly end. A grant may be under way, or come yet: the answer names the last lease. Without an answer, what
     has come is let go of. */
  :: d_step { IF(BYES) && RUNS(_pid) && (ast[_pid] == IDLE || ast[_pid] == WAITING) && !LOST(_pid) ->
       conn[_pid] = 4; ast[_pid] = LEAVING }
  :: d_step { RUNS(_pid) && ast[_pid] == LEAVING && conn[_pid] == 5 && !LOST(_pid) ->
       if
       :: IN(0, _pid) && sl_last[0] > rel[_pid] -> return_unopened(_pid, sl_last[0])
       :: IN(1, _pid) && sl_last[1] > rel[_pid] -> return_unopened(_pid, sl_last[1])
       :: else
       fi;
       leave(_pid); REACHED(bye) }
  :: d_step { RUNS(_pid) && ast[_pid] == LEAVING && (conn[_pid] == 4 || LOST(_pid)) ->
       if
       :: gep[_pid] != 0 && !IF(M_bye_gives_up) ->
            ATTACHER(_pid, AttacherReturn, gep[_pid], gid[_pid])
            acknowledge(_pid); REACHED(bye_unanswered_with_a_grant)
       :: else
       fi;
       leave(_pid); REACHED(bye_unanswered) }

  /* Holding nothing, it looks for the next owner. */
  :: d_step { RUNS(_pid) && (ast[_pid] == HELLO || ast[_pid] == IDLE || ast[_pid] == WAITING) && LOST(_pid) ->
       disconnect(_pid) }
  od
}

/* ================================================================= owner */

#define ADMISSIBLE(k, i) (SLOT_FREE(k) || (IF(M_slot_reused_early) && !IN(k, i) && conn[HOLDER(k)] == 0))

inline take_slot(k, i) {
  HOLD(SlotOfTheDead, SLOT_FREE(k));
  sl_inc[k] = i + 1; sl_ep[k] = 0; sl_id[k] = 0;
  if
  :: IF(M_lease_ids_restart) -> rel[i] = sl_last[k]; seq = 0     /* with the words of the last holder */
  :: else -> rel[i] = 0
  fi;
  sl_last[k] = 0
}

/* What a worker said in words that nobody will read again. */
inline settle_mark(i) {
  if
  :: mark == i + 1 && (prep & BIT(i)) && !IF(M_prepared_not_read) -> mark = PREPARED; REACHED(prepared)
  :: mark == i + 1 && !((prep & BIT(i)) && !IF(M_prepared_not_read)) -> mark = UNPREPARED
  :: else
  fi;
  prep = prep & ~BIT(i)
}

/* A new connection of a living process: its earlier words are read one last time. */
inline greet_again(k, i) {
  SEE_RELEASES
  if
  :: sl_ep[k] != 0 && ACKED(k) -> sl_ep[k] = 0; sl_id[k] = 0
  :: else
  fi;
  settle_mark(i);
  rel[i] = 0;
  REACHED(connected_again)
}

#define ADMIT(i)                                                                                                    \
  :: d_step { ORUNS && conn[i] == 1 && !LOST(i) && LIVES(i) &&                                                      \
              (IN(0, i) || IN(1, i) || ADMISSIBLE(0, i) || ADMISSIBLE(1, i)) ->                                     \
       if                                                                                                           \
       :: IN(0, i) -> greet_again(0, i)                                                                             \
       :: IN(1, i) -> greet_again(1, i)                                                                             \
       :: !IN(0, i) && !IN(1, i) && ADMISSIBLE(0, i) -> take_slot(0, i)                                             \
       :: !IN(0, i) && !IN(1, i) && !ADMISSIBLE(0, i) && ADMISSIBLE(1, i) -> take_slot(1, i)                        \
       fi;                                                                                                          \
       if                                                                                                           \
       :: i > 1 -> REACHED(slot_reused)                                                                             \
       :: else                                                                                                      \
       fi;                                                                                                          \
       OWNER_NOTES(HelloWelcome, 0, 11 + i)                                                                         \
       want[i] = 0; conn[i] = 2 }

/* A worker is let in alone: nobody else may write to the blocks, neither a living worker nor what one that died
   has left behind. */
#define ALONE (ENDED(owe[ses]) || IF(M_two_workers)) && (!(cm & OMEM) || IF(M_child_writes_on))
#define MAY_GRANT(i) (oalive && want[i] != 0 && !LOST(i) && owp[ses] == Ready && owe[ses] >= want[i] &&             \
                      (IN(0, i) || IN(1, i)) && !LEASE_OF(i) && (!IF(MOVER_OWNS) || (ALONE)))

#ifdef STEPS
inline record_grant(k) {
  lease_at[k] = 0;
  LEASE_OF_SLOT(k, OwnerRecord)
  LEASE_OF_SLOT(k, OwnerSend)
  LEASE_OF_SLOT(k, OwnerGranted)
  skip
}
#endif

/* The lease is recorded before the handle leaves, in the same step of the one thread. */
inline grant(i) {
  SEE_RELEASES
  seq++;
  HOLD(GrantNotAckedYet, seq > rel[i]);
  HOLD(OneWorkerAtATime, !IF(MOVER_OWNS) || (ALL_OF(HOLDS_NOT, owe[ses]) && !(cm & OMEM)));
  if
  :: IN(0, i) -> sl_ep[0] = owe[ses]; sl_id[0] = seq; sl_last[0] = seq
  :: IN(1, i) -> sl_ep[1] = owe[ses]; sl_id[1] = seq; sl_last[1] = seq
  fi;
#ifdef STEPS
  if
  :: IN(0, i) -> record_grant(0)
  :: else -> record_grant(1)
  fi;
#endif
  HOLD(NoGrantAfterRevoke, owp[ses] == Ready);
  if
  :: mark != UNPREPARED && mark != PREPARED && !LEASE_OF((mark - 1)) -> settle_mark((mark - 1))
  :: else
  fi;
  if
  :: mark == PREPARED || IF(M_unprepared_served) -> gprep = gprep | BIT(i)
  :: else -> mark = i + 1; prep = prep & ~BIT(i)
  fi;
  gep[i] = owe[ses]; gid[i] = seq; want[i] = 0
}
#define ANSWER_BYE(i) :: d_step { ORUNS && conn[i] == 4 && !LOST(i) -> want[i] = 0; conn[i] = 5 }
#define GRANT(i) :: d_step { ORUNS && !IF(M_two_threads) && MAY_GRANT(i) -> grant(i) }

/* A mutant: requests are served by a thread of its own. */
#define DECIDE(i) :: d_step { IF(M_two_threads) && granting == 0 && MAY_GRANT(i) -> granting = i + 1 }
active proctype Granter() {
end:
  do
  EACH(DECIDE)
  :: d_step { granting != 0 && !(oalive && want[granting - 1] != 0) -> granting = 0 }
  :: d_step { granting != 0 && oalive && want[granting - 1] != 0 -> grant((granting - 1)); granting = 0 }
  od
}

/* The pidfd is readable. It may have released, or prepared, just before it died. */
#define BURY(k)                                                                                                     \
  :: d_step { ORUNS && sl_inc[k] != 0 && DEAD_VIEW(HOLDER(k)) ->                                                    \
       SEE_RELEASES                                                                                                 \
       if                                                                                                           \
       :: LEASE(k) -> LEASE_OF_SLOT(k, OwnerSeesDeath)                                                              \
            deaths = deaths | EP(sl_ep[k]); REACHED(lease_ended_by_death)                                           \
       :: else -> OWNER_NOTES(OwnerSeesDeath, 0, 10 + sl_inc[k]) skip                                               \
       fi;                                                                                                          \
       IN_STEPS(lease_at[k] = 0;)                                                                                   \
       settle_mark(HOLDER(k));                                                                                      \
       sl_last[k] = (IF(M_lease_ids_restart) -> rel[HOLDER(k)] : 0);                                                \
       rel[HOLDER(k)] = 0; sl_inc[k] = 0; sl_ep[k] = 0; sl_id[k] = 0 }

#define REAP(e)                                                                                                     \
  :: d_step { ORUNS && (quar & EP(e)) &&                                                                            \
              ((ENDED(e) && !(quar_own & EP(e)) && !(cm & MEM(ses, e))) || (IF(M_reaped_early) && stage == NONE)) ->\
       if                                                                                                           \
       :: om & MEM(ses, e) -> SEE_RELEASES OWNER_NOTES(OwnerReap, e, 0) free_now(e)                                 \
       :: else                                                                                                      \
       fi;                                                                                                          \
       HOLD(QuarantineEndsWithMemoryBack, BACK(MEM(ses, e)));                                                       \
       quar = quar & ~EP(e); deaths = deaths & ~EP(e); REACHED(quarantine_ended) }

/* Movers that did not let go get SIGKILL; their death still has to be proven. */
inline sigkill(i) {
  if
  :: LIVES(i) && LEASE_OF(i) ->
       HOLD(WorkersNeverKilled, !IF(MOVER_OWNS));
#ifdef STEPS
       if
       :: IN(0, i) -> LEASE_OF_SLOT(0, OwnerKill) skip
       :: else -> LEASE_OF_SLOT(1, OwnerKill) skip
       fi;
#endif
       akill = akill | BIT(i); REACHED(mover_killed)
  :: else
  fi
}
#define SIGKILL(i) sigkill(i);
#define FORGET_REQUEST(i) want[i] = 0;
#define KILLS (!IF(MOVER_OWNS) || IF(M_worker_killed))
#define LATE  (ORUNS && !IF(NO_DEADLINE))

active proctype Owner() {
  IN_STEPS(d_step { OWNER_NOTES(HelloListen, 0, 0) skip };)
end:
  do
  :: d_step { ORUNS && owe[ses] < NEP && (owp[ses] == Vacant || owp[ses] == Cleared || owp[ses] == Quarantined) &&
              (quar_own == 0 || IF(M_next_epoch_in_own_use)) ->
       HOLD(OneEpochOfOwnUse, quar_own == 0);
       if
       :: owp[ses] == Quarantined && quar != 0 -> REACHED(next_epoch_beside_quarantine)
       :: else
       fi;
       SEE_RELEASES
       OWNER(OwnerAllocate, owe[ses] + 1)
       om = om | MEM(ses, owe[ses] + 1);
       if
       :: IF(MOVER_OWNS) -> mark = UNPREPARED
       :: else -> mark = PREPARED; zeroed = zeroed | MEM(ses, owe[ses] + 1)
       fi;
       if
       :: IF(M_parked_forgotten) -> EACH(FORGET_REQUEST) skip
       :: else
       fi;
       if
       :: IF(M_same_epoch_again) && owe[ses] > 0 -> OWNER(OwnerReady, owe[ses]) publish(Ready, owe[ses])
       :: else -> OWNER(OwnerReady, owe[ses] + 1) publish(Ready, owe[ses] + 1)
       fi;
       OWNER(OwnerPublished, owe[ses])
       skip }

  EACH(ADMIT)
  EACH(GRANT)
  EACH(ANSWER_BYE)
  BURY(0)
  BURY(1)

  :: d_step { ORUNS && stage == LEASES && IF(M_no_wait) -> free_epoch(); end_clear(Cleared) }
  :: d_step { ORUNS && (stage == LEASES || stage == KILLING) && ENDED(owe[ses]) ->
       SEE_RELEASES
       free_arena() }
  :: d_step { LATE && stage == LEASES && !ENDED(owe[ses]) ->
       SEE_RELEASES
       if
       :: IF(M_free_at_deadline) -> free_epoch(); end_clear(Cleared)
       :: !IF(M_free_at_deadline) && KILLS -> EACH(SIGKILL) stage = KILLING
       :: else -> quarantine()
       fi }
  :: d_step { LATE && stage == KILLING && !ENDED(owe[ses]) ->
       SEE_RELEASES
       REACHED(kill_not_proven); quarantine() }
  :: d_step { ORUNS && stage == UNMAPPING && !(cm & OMEM) -> free_epoch(); stage = SETTLING }
  :: d_step { LATE && stage == UNMAPPING && (cm & OMEM) -> REACHED(child_keeps_legacy); quarantine() }
  :: d_step { ORUNS && stage == SETTLING && BACK(OMEM) -> end_clear(Cleared) }
  :: d_step { LATE && stage == SETTLING && !BACK(OMEM) -> REACHED(child_keeps_vmm); quarantine() }

  REAP(1)
#if NEP > 1
  REAP(2)
#endif
#if NEP > 2
  REAP(3)
#endif
  od
}

/* ================================================================= environment */

inline revoke() {
  OWNER(OwnerRevoke, owe[ses])
  stage = LEASES;
  publish(Revoking, owe[ses]);
  OWNER(OwnerPublished, owe[ses])
  skip
}

#define FORGET(i) want[i] = 0; rel[i] = 0;
/* The driver takes back what only the dead owner had; what others map stays until they close it. */
inline owner_dies() {
  IN_STEPS(owner_at = 0; lease_at[0] = 0; lease_at[1] = 0; own_late = 0;)
  om = 0; oalive = 0; ostop = 0; stage = NONE; deaths = 0; seq = 0; ownstuck = 0; quar = 0; quar_own = 0;
  mark = UNPREPARED; prep = 0; granting = 0;
  sl_inc[0] = 0; sl_ep[0] = 0; sl_id[0] = 0; sl_last[0] = 0;
  sl_inc[1] = 0; sl_ep[1] = 0; sl_id[1] = 0; sl_last[1] = 0;
  EACH(FORGET)
  skip
}

#define LIVING(i) (LIVES(i) -> 1 : 0)
#define CRASH(i)                                                                                                    \
  :: d_step { IF(CRASHES_A) && LIVES(i) -> die(i, false) }                                                          \
  :: d_step { IF(CHILDREN) && LIVES(i) && am[i] != 0 -> die(i, true); REACHED(child_left) }
#define KILLED(i)  :: d_step { LIVES(i) && (akill & BIT(i)) -> die(i, false) }
#define STOP(i)    :: d_step { IF(STOPS) && RUNS(i) && MAY_FAULT -> faults++; astop = astop | BIT(i) }
#define CONT(i)                                                                                                     \
  :: d_step { astop & BIT(i) -> astop = astop & ~BIT(i);                                                            \
       if                                                                                                           \
       :: am[i] != 0 && !LOST(i) && !CURRENT(i) -> REACHED(continued_under_revoke)                                  \
       :: else                                                                                                      \
       fi }
#define CUT(i)                                                                                                      \
  :: d_step { IF(CUTS) && LIVES(i) && conn[i] != 0 && !LOST(i) && MAY_FAULT ->                                      \
       faults++; cut = cut | BIT(i); want[i] = 0 }
#define UNSTICK(i) :: d_step { ast[i] == STUCK -> ATTACHER(i, AttacherDrain, gep[i], gid[i]) ast[i] = DRAINING }
/* Its own process asks for it: a mapped epoch is let go of, one under way is not taken any more. */
#define DETACH(i)                                                                                                   \
  :: d_step { RUNS(i) && ast[i] == MAPPED && minep[i] <= gep[i] ->                                                  \
       ATTACHER(i, AttacherDrain, gep[i], gid[i])                                                                   \
       minep[i] = gep[i] + 1; ast[i] = DRAINING }                                                                   \
  :: d_step { RUNS(i) && ast[i] == WAITING && minep[i] <= owe[ases[i]] -> minep[i] = owe[ases[i]] + 1 }

active proctype Environment() {
end:
  do
  :: IF(REST) -> skip
  /* a supervisor */
  :: d_step { incs < NINC && SUM(LIVING) < 2 -> ast[incs] = SEARCH; minep[incs] = 1; incs++ }
  :: d_step { !oalive && ses + 1 < NSES ->
       ses++; oalive = 1; OWNER_NOTES(HelloListen, 0, 0) REACHED(next_session) }
  /* an operator: the owner's own user stops first */
  :: d_step { ORUNS && owp[ses] == Ready ->
       OWNER(OwnerDrain, owe[ses])
       OWNER(OwnerDrained, owe[ses])
       revoke() }
  EACH(DETACH)
  /* the owner's own work does not end: a mover exits, a worker goes on as if it had */
  :: d_step { ORUNS && owp[ses] == Ready && IF(HANGS) && MAY_FAULT ->
       faults++;
       OWNER(OwnerDrain, owe[ses])
       OWNER(OwnerStuck, owe[ses])
       if
       :: IF(MOVER_OWNS) -> owner_dies()
       :: else -> ownstuck = 1; IN_STEPS(own_late = 1;) revoke()
       fi }
  :: d_step { ownstuck -> ownstuck = 0 }
  :: d_step { quar_own != 0 -> quar_own = 0 }
  EACH(UNSTICK)
  EACH(CRASH)
  EACH(KILLED)
  :: d_step { cm != 0 -> cm = 0 }                      /* the child ends */
  :: d_step { IF(CRASHES_O) && oalive -> owner_dies() }
  /* the owner ends in an orderly way: its clear comes before; what is in quarantine the driver takes back */
  :: d_step { IF(CRASHES_O) && ORUNS && stage == NONE && owp[ses] != Ready && owp[ses] != Shutdown ->
       SEE_RELEASES
       OWNER(OwnerShutdown, owe[ses])
       publish(Shutdown, owe[ses]); REACHED(shut_down);
       OWNER(OwnerPublished, owe[ses])
       skip }
  :: d_step { oalive && owp[ses] == Shutdown -> owner_dies() }
  EACH(STOP)
  EACH(CONT)
  :: d_step { IF(STOPS) && ORUNS && MAY_FAULT -> faults++; ostop = 1 }
  :: d_step { ostop -> ostop = 0 }
  EACH(CUT)
  od
}

/* ================================================================= liveness */

#define STOPPED(i) (astop & BIT(i))
#define CLEARS     (owp[0] == Revoking && oalive && !ostop)
#define KEEPS      (ast[0] == STUCK || STOPPED(0))
ltl ClearEnds     { [] (CLEARS -> <> !CLEARS) }
ltl LetsGo        { [] ((am[0] != 0 && (!oalive || ases[0] != ses)) -> <> (am[0] == 0 || KEEPS)) }
ltl LeavesRevoked { [] ((am[0] != 0 && owp[0] == Revoking && ases[0] == 0) ->
                        <> (am[0] == 0 || KEEPS || owp[0] != Revoking)) }
ltl AcksOrDies    { [] (ast[0] == DRAINING -> <> ((ast[0] != DRAINING && ast[0] != HUNG) || STOPPED(0))) }
/* Nobody is in the way of attacher 0: the epoch that it may have is there and stays, and, where workers attach, no
   other worker and no child of one has it. */
#define CALM (oalive && !ostop && ses == 0 && owp[0] == Ready && minep[0] <= owe[0] && ast[0] >= SEARCH &&          \
              ast[0] != STUCK && ast[0] < LEAVING && !STOPPED(0) &&                                                 \
              (!IF(MOVER_OWNS) || (am[1] == 0 && gep[1] == 0 && cm == 0)))
ltl NotStarved    { (<> [] CALM) -> (<> [] (ast[0] == MAPPED)) }
