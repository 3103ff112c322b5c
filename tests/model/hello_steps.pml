/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* The marks of hello.pml (steps.pml). Each life of a process is a writer: those of the first, a worker, from 1, of
   the second, a mover, from 11; the life of one that listens is a session. Who allocates, or asks for an epoch, says
   so; what comes of it is lease.pml's. */
#include "steps.pml"
#ifdef STEPS
byte hello_at[2], owner_at[2], attacher_at[2];

/* For the text of runs alone, which are told step by step: no part of the state. */
hidden byte life[2];

#define ROLE_CONFLICT 8      /* ErrorCode::kRoleConflict */
#define WRITER(i)     (1 + 10 * (i) + life[i])
/* What is compared, as a number: who owns, in the last two bits, of which kind who listens is, and all else. */
#define COMPARES(i, listener)                                                                                       \
  (1 + (owner[i] -> (i) : 1 - (i)) + 4 * (listener) + (misfit && (i) -> 8 : 0))

#define HELLO(i, transition, session, detail)                                                                       \
  s_at = i; STEP(Hello, transition, now.hello_at[s_at], WRITER(i), session, 0, 0, 0, detail)
#define HELLO_NOTES(i, transition, session, peer, detail)                                                           \
  STEP(none, transition, no_state, WRITER(i), session, 0, 0, peer, detail)
#define LISTENS_AS_OWNER(i) HELLO_NOTES(i, HelloListen, WRITER(i), 0, COMPARES(i, i))
#define LISTENS_TO_MEET(i)  HELLO_NOTES(i, HelloMeet, 0, 0, COMPARES(i, i))
#define SAYS_HELLO(i)       HELLO(i, HelloSay, 0, COMPARES(i, 1 - i))
#define WELCOMES(i)         HELLO_NOTES(i, HelloWelcome, WRITER(i), WRITER(1 - i), 0)
#define REFUSES(i)          HELLO_NOTES(i, HelloRefuse, (st[i] == SEEKS -> 0 : WRITER(i)), WRITER(1 - i), ROLE_CONFLICT)
#define IS_WELCOME(i)       HELLO(i, HelloWelcomed, WRITER(1 - i), 0)
#define IS_REFUSED(i)       HELLO(i, HelloRefused, 0, ROLE_CONFLICT)
#define GIVES_UP(i)         HELLO(i, HelloGivesUp, 0, ROLE_CONFLICT)

inline allocates(i) {
  s_at = i;
  if
  :: owner[i] -> STEP(Owner, OwnerAllocate, now.owner_at[s_at], WRITER(i), WRITER(i), 1, 0, 0, 0)
  :: else -> STEP(Attacher, AttacherAsk, now.attacher_at[s_at], WRITER(i), WRITER(1 - i), 1, 0, 0, 0)
  fi
}
#define ALLOCATES(i)        allocates(i);
#define OWNER_IS_NEW(i)     attacher_at[i] = 0;
#define HAS_DIED(i)         hello_at[i] = 0; owner_at[i] = 0; attacher_at[i] = 0; life[i]++;
#else
#define LISTENS_AS_OWNER(i)
#define LISTENS_TO_MEET(i)
#define SAYS_HELLO(i)
#define WELCOMES(i)
#define REFUSES(i)
#define IS_WELCOME(i)
#define IS_REFUSED(i)
#define GIVES_UP(i)
#define ALLOCATES(i)
#define OWNER_IS_NEW(i)
#define HAS_DIED(i)
#endif
