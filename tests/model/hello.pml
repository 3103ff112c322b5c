/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* Hello (docs/handshake.md, rule 7; ipc/src/lease/hello.cpp, rendezvous.cpp): two processes of one rank, each started
   as owner or as attacher, alike or not in what else is compared. Owners bind the lease name under a lock; attachers
   connect to it, or, while nobody listens, meet on the seek name. What disagrees shows on both sides, nobody waits,
   and nothing is allocated before.

   Left out, and why that hides nothing:
   - A process is refused for one reason or another: which of geometry, ranks, handles, version or uid it was makes no
     difference to who tells whom. Attachers compare roles alone, so that misfit counts between owner and attacher.
   - The two are a worker and a mover, so that two owners, or two attachers, are always in conflict. (Two movers that
     attach are lease.pml's.)
   - A search repeats by itself (inotify, back-off): here a step that is possible again and again.
   - A refused process stays as it is, and says so, until somebody restarts it.

   Knobs: FAULTS how many deaths, REST, and one M_ flag per mutant. */
#define FLAGS                                                                                                       \
  FLAG(FAULTS) FLAG(REST) FLAG(M_no_rendezvous) FLAG(M_second_bind_steals) FLAG(M_refusal_is_retried)               \
  FLAG(M_allocates_first) FLAG(M_stale_name_kept) FLAG(M_refuses_the_returning) FLAG(M_misfit_not_compared)  \
  STEP_FLAGS
#define PROPERTIES                                                                                                  \
  PROPERTY(OneOwner) PROPERTY(RefusedOnlyOnConflict) PROPERTY(HelloBeforeAllocation) PROPERTY(MapsOnlyWhatFits)       \
  PROPERTY(RefusedForGood) STEP_PROPERTIES
#include "common.pml"

#define START    0
#define LISTENS  1   /* an owner that has the name */
#define SEARCHES 2   /* an attacher that found nobody */
#define SEEKS    3   /* and waits on the seek name */
#define GREETS   4   /* has said hello, waits for the answer */
#define AGREED   5
#define REFUSED  6
#define DEAD     7
#define NOBODY   2
#define STALE    3   /* the file of a dead one; the kernel has dropped its lock */

byte st[2];
bit owner[2];                /* its role, by --cache-owner and its kind */
bit misfit;                  /* they differ in something else */
byte name = NOBODY;          /* who listens on the lease name */
byte seek = NOBODY;          /* who listens on the seek name */
bit mapped[2];
byte answer[2];              /* on its way to it: 1 welcome, 2 refused */
bit greeted[2];              /* a hello is at it */
bit lost[2];                 /* its connection is gone: the other end died */
bit told;                    /* the roles are given */
byte faults;
bit refused[2];              /* it was told so */

#define ME     _pid
#define OTHER  (1 - _pid)
#define LIVES(i) (st[i] != DEAD)
#define HELD(x) (x < NOBODY)
#define CONFLICT (owner[0] == owner[1] || misfit)

#include "hello_steps.pml"

inline greet(i, listener) {
  HOLD(RefusedForGood, !refused[i]);
  SAYS_HELLO(i)
  greeted[listener] = 1; st[i] = GREETS
}

inline refuse(i) {
  HOLD(RefusedOnlyOnConflict, CONFLICT);
  GIVES_UP(i)
  st[i] = REFUSED;
  if
  :: name == i -> name = NOBODY
  :: else
  fi;
  if
  :: seek == i -> seek = NOBODY
  :: else
  fi
}

inline map(i) {
  HOLD(HelloBeforeAllocation, st[i] == AGREED);
  HOLD(MapsOnlyWhatFits, !CONFLICT);
  ALLOCATES(i)
  mapped[i] = 1
}

active [2] proctype Process() {
  told;
end:
  do
  /* An owner: the lock tells whether the name is taken by a living process. */
  :: d_step { st[ME] == START && owner[ME] && (!HELD(name) || IF(M_second_bind_steals)) &&
              !(IF(M_stale_name_kept) && name != NOBODY) ->
       HOLD(OneOwner, !HELD(name)); LISTENS_AS_OWNER(ME) name = ME; st[ME] = LISTENS }
  :: d_step { st[ME] == START && owner[ME] && HELD(name) && !IF(M_second_bind_steals) ->
       greet(ME, name) }
  /* An attacher. */
  :: d_step { (st[ME] == START || st[ME] == SEARCHES || st[ME] == SEEKS) && !owner[ME] && HELD(name) ->
       if
       :: seek == ME -> seek = NOBODY
       :: else
       fi;
       if
       :: IF(M_allocates_first) -> map(ME)
       :: else
       fi;
       greet(ME, name) }
  :: d_step { st[ME] == START && !owner[ME] && !HELD(name) -> st[ME] = SEARCHES }
  :: d_step { st[ME] == SEARCHES && !HELD(name) && !HELD(seek) && !IF(M_no_rendezvous) ->
       LISTENS_TO_MEET(ME) seek = ME; st[ME] = SEEKS }
  :: d_step { st[ME] == SEARCHES && !HELD(name) && seek == OTHER && HELD(seek) ->
       greet(ME, OTHER); REACHED(met_on_seek) }

  /* Whoever listens compares and answers. */
  :: d_step { greeted[ME] && (st[ME] == LISTENS || st[ME] == AGREED || st[ME] == SEEKS) ->
       greeted[ME] = 0; lost[ME] = 0;
       if
       :: CONFLICT && !(IF(M_misfit_not_compared) && owner[0] != owner[1]) ->
            REFUSES(ME)
            answer[OTHER] = (LIVES(OTHER) -> 2 : 0); REACHED(conflict);
            if
            :: st[ME] == SEEKS -> refuse(ME)           /* an owner serves on, and shows who came */
            :: else -> REACHED(owner_shows_conflict)
            fi
       :: else ->
            if
            :: st[ME] == SEEKS
            :: st[ME] != SEEKS && IF(M_refuses_the_returning) && faults > 0 ->
                 REFUSES(ME) answer[OTHER] = (LIVES(OTHER) -> 2 : 0)
            :: else -> WELCOMES(ME) answer[OTHER] = (LIVES(OTHER) -> 1 : 0); st[ME] = AGREED
            fi
       fi }
  :: d_step { st[ME] == GREETS && answer[ME] == 1 ->
       IS_WELCOME(ME) answer[ME] = 0; st[ME] = AGREED; map(ME); REACHED(agreed) }
  /* An owner waits for nobody: it has the name. */
  :: d_step { owner[ME] && (st[ME] == LISTENS || st[ME] == AGREED) && !mapped[ME] ->
       HOLD(OneOwner, !(owner[OTHER] && mapped[OTHER])); ALLOCATES(ME) mapped[ME] = 1 }
  :: d_step { st[ME] == GREETS && answer[ME] == 2 ->
       IS_REFUSED(ME) answer[ME] = 0; refused[ME] = 1;
       if
       :: IF(M_refusal_is_retried) -> st[ME] = START
       :: else -> refuse(ME)
       fi }
  /* The other has died, and may live again: a new life knows nothing of us. */
  :: d_step { lost[ME] && (st[ME] != GREETS || answer[ME] == 0) ->
       lost[ME] = 0;
       if
       :: st[ME] == GREETS || (st[ME] == AGREED && !owner[ME]) ->
            OWNER_IS_NEW(ME) mapped[ME] = 0; st[ME] = START; REACHED(starts_over)
       :: st[ME] == AGREED && owner[ME] -> st[ME] = LISTENS
       :: else
       fi }
  od
}

inline dies(i) {
  faults++;
  HAS_DIED(i)
  st[i] = DEAD; refused[i] = 0; mapped[i] = 0; greeted[0] = 0; greeted[1] = 0; answer[i] = 0; lost[i] = 0;
  lost[1 - i] = (st[1 - i] == GREETS || st[1 - i] == AGREED);
  name = (name == i -> STALE : name);
  seek = (seek == i -> STALE : seek)
}

active proctype Environment() {
  if
  :: d_step { owner[0] = 1; owner[1] = 1; told = 1 }
  :: d_step { owner[0] = 1; told = 1 }
  :: d_step { owner[1] = 1; told = 1 }
  :: d_step { owner[0] = 1; misfit = 1; told = 1; REACHED(misfit) }
  :: d_step { owner[1] = 1; misfit = 1; told = 1 }
  :: told = 1
  fi;
end:
  do
  :: IF(REST) -> skip
  :: d_step { c_expr { now.faults < FAULTS } && LIVES(0) -> dies(0) }
  :: d_step { c_expr { now.faults < FAULTS } && LIVES(1) -> dies(1) }
  /* a supervisor */
  :: d_step { st[0] == DEAD -> st[0] = START; REACHED(restarted) }
  :: d_step { st[1] == DEAD -> st[1] = START }
  od
}

#define BOTH_LIVE (LIVES(0) && LIVES(1))
#define TOLD(i) (st[i] == REFUSED)
/* Two attachers are both refused; of two owners, or an owner and an attacher that does not fit, one is, and the
   other, an owner, shows it and serves on. */
ltl ConflictIsTold { (<> [] (BOTH_LIVE && told && CONFLICT)) ->
                     (<> [] ((TOLD(0) && TOLD(1)) || (TOLD(0) && owner[1]) || (TOLD(1) && owner[0]))) }
/* Where one of two attachers dies after the other was refused, its next life has nobody to compare with: it searches
   on, and who restarts it finds the other refused. */
ltl SomebodyIsTold { (<> [] (BOTH_LIVE && told && CONFLICT)) -> (<> [] (TOLD(0) || TOLD(1))) }
ltl AgreementServes { (<> [] (BOTH_LIVE && told && !CONFLICT)) -> (<> [] (st[0] == AGREED && st[1] == AGREED)) }
