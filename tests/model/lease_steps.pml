/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* The marks of lease.pml (steps.pml). Owners are writers from 1, attachers from 11. */
#include "steps.pml"
#ifdef STEPS
byte owner_at, lease_at[NSLOT], attacher_at[NINC];
byte hello_at[NINC];         /* of the present connection: what came before is hello.pml's */
bit own_late;                /* the owner's own work outlived its drain, and was not seen to end yet */

#define ATTACHER(i, transition, epoch, lease)                                                                       \
  s_at = i; STEP(Attacher, transition, now.attacher_at[s_at], 11 + i, ases[i] + 1, epoch, lease, 0, 0)
#define GREETER(i, transition, session)                                                                             \
  s_at = i; STEP(Hello, transition, now.hello_at[s_at], 11 + i, session, 0, 0, 0, 0)
#define SAYS_HELLO(i) GREETER(i, HelloSay, 0)
#define IS_WELCOME(i) GREETER(i, HelloWelcomed, ases[i] + 1)
#define OWNER(transition, epoch)                                                                                    \
  STEP(Owner, transition, now.owner_at, ses + 1, ses + 1, epoch, 0, 0, 0)
#define LEASE_OF_SLOT(k, transition)                                                                                \
  s_at = k; STEP(Lease, transition, now.lease_at[s_at], ses + 1, ses + 1, sl_ep[k], sl_id[k], 10 + sl_inc[k], 0)
/* No moves: about what is no state of a machine. */
#define ATTACHER_NOTES(i, transition) STEP(none, transition, no_state, 11 + i, ases[i] + 1, 0, 0, 0, 0)
#define OWNER_NOTES(transition, epoch, peer) STEP(none, transition, no_state, ses + 1, ses + 1, epoch, 0, peer, 0)

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
#else
#define ATTACHER(i, transition, epoch, lease)
#define SAYS_HELLO(i)
#define IS_WELCOME(i)
#define OWNER(transition, epoch)
#define LEASE_OF_SLOT(k, transition)
#define ATTACHER_NOTES(i, transition)
#define OWNER_NOTES(transition, epoch, peer)
#define SEE_RELEASES
#endif
