/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* The marks of ranks.pml (steps.pml). Each life of a process is a writer: managers from 1, the owners of rank r, which
   are workers, from 40 + 10 r; each of these lives is a session. */
#include "steps.pml"
#ifdef STEPS
byte order_at[2], registration_at[2], owner_at[2];

/* For the text of runs alone, which are told step by step: no part of the state. */
hidden byte manager_life, told_epoch[2];

#define MANAGER            (1 + manager_life)
#define SESSION(r, life)   (1 + 10 * (r) + (life))
#define RANK(r, life)      (40 + 10 * (r) + (life))

/* About the life of the rank that was told. */
#define ORDER_STEP(r, transition, detail)                                                                           \
  s_at = r;                                                                                                         \
  STEP(Order, transition, now.order_at[s_at], MANAGER, SESSION(r, askedses[r]), told_epoch[r], opid,                \
       RANK(r, askedses[r]), detail)
#define TELLS(transition) STEP(none, transition, no_state, MANAGER, 0, 0, opid, 0, 0)
#define OWNER(r, transition)                                                                                        \
  s_at = r;                                                                                                         \
  STEP(Owner, transition, now.owner_at[s_at], RANK(r, session[r]), SESSION(r, session[r]), ep[r], 0, 0, 0)

/* A manager that is not there has its turn with next_manager. */
inline registers(r) {
  if
  :: clive && live[r] ->
       STEP(none, ManagerRegister, no_state, MANAGER, 0, 0, 0, RANK(r, session[r]), 0)
       s_at = r;
       STEP(Registration, PeerRegister, now.registration_at[s_at], RANK(r, session[r]), 0, 0, 0, 0, 0)
       STEP(Registration, PeerRegistered, now.registration_at[s_at], RANK(r, session[r]), 0, 0, 0, MANAGER, 0)
  :: else
  fi
}
inline told(r, what, epoch) {
  told_epoch[r] = epoch;
  if
  :: what == CLEAR -> ORDER_STEP(r, ManagerClear, 1)
  :: else -> ORDER_STEP(r, ManagerReinit, 1)
  fi
}
inline takes_reply(r) {
  if
  :: reply[r] == 3 -> ORDER_STEP(r, ManagerGivesUp, 0)
  :: reply[r] != 3 && op == CLEAR -> ORDER_STEP(r, ManagerSeesCleared, reply[r] - 1)
  :: else -> ORDER_STEP(r, ManagerSeesReady, 0)
  fi
}
inline begins_clear(r) {
  OWNER(r, OwnerDrain) OWNER(r, OwnerDrained) OWNER(r, OwnerRevoke) OWNER(r, OwnerPublished)
}
inline ends_clear(r, quarantined) {
  if
  :: quarantined -> OWNER(r, OwnerKeep) OWNER(r, OwnerQuarantined)
  :: else -> OWNER(r, OwnerFree) OWNER(r, OwnerFreed) OWNER(r, OwnerCleared)
  fi;
  OWNER(r, OwnerPublished)
}
inline begins_life(r) {
  STEP(none, HelloListen, no_state, RANK(r, session[r]), SESSION(r, session[r]), 0, 0, 0, 0)
}
inline makes(r) {
  OWNER(r, OwnerAllocate) OWNER(r, OwnerReady) OWNER(r, OwnerPublished)
}
inline rank_is_dead(r) { owner_at[r] = 0; registration_at[r] = 0 }
/* Whoever lives registers at the next one, which has told nobody anything. */
inline next_manager() {
  manager_life++; order_at[0] = 0; order_at[1] = 0;
  registers(0);
  registers(1)
}
#define GIVES_UP(r)              ORDER_STEP(r, ManagerGivesUp, 0)
#define REGISTERS(r)             registers(r);
#define TOLD(r, what, epoch)     told(r, what, epoch);
#define TAKES_REPLY(r)           takes_reply(r);
#define BEGINS_CLEAR(r)          begins_clear(r);
#define ENDS_CLEAR(r, quarantined) ends_clear(r, quarantined);
#define MAKES(r)                 makes(r);
#define RANK_IS_DEAD(r)          rank_is_dead(r);
#define BEGINS_LIFE(r)           begins_life(r);
#define NEXT_MANAGER             next_manager();
#else
#define TELLS(transition)
#define GIVES_UP(r)
#define REGISTERS(r)
#define TOLD(r, what, epoch)
#define TAKES_REPLY(r)
#define BEGINS_CLEAR(r)
#define ENDS_CLEAR(r, quarantined)
#define MAKES(r)
#define RANK_IS_DEAD(r)
#define BEGINS_LIFE(r)
#define NEXT_MANAGER
#endif
