/* SPDX-FileCopyrightText: The kvferry authors */
/* SPDX-License-Identifier: Apache-2.0 */
/* What all models share.

   PROPERTIES  the safety properties of a model, listed before it includes this file.
   HOLD(property, condition)  is where one of them is looked at. The checker prints the text of a failed assertion,
               and the name of the property is in it.
   ONLY=NAME   in KNOBS: no other property is looked at, so that a mutant is judged by the property that is meant to
               catch it, whatever else it breaks before.
   REACHED(name)  this step was taken. A checker that never gets to the interesting steps proves nothing, so
               scripts/model.sh demands them. The marks are outside of the state: they cost nothing.
   FLAGS, IF(flag)  a knob or a mutant, set for one run through the variable KNOBS ("LEGACY FAULTS=2 M_no_wait"), so
               that one compiled checker serves many runs. */
#ifndef STEPS
#define HOLD(property, condition) assert(property || c_expr { skip_##property } || (condition))
#define REACHED(name)             c_code { reach(#name); }
#define STEP_PROPERTIES
#define STEP_FLAGS
#else                        /* see steps.pml */
#define HOLD(property, condition)                                                                                   \
  if                                                                                                                \
  :: property || c_expr { skip_##property } || (condition)                                                          \
  :: else -> assert(property || c_expr { AFTER }); c_code { if (!now.after) now.after = 1; }                        \
  fi
#define REACHED(name)             c_code { reach(#name); if (is_goal(#name) && !now.after) now.after = 1; }
#define STEP_PROPERTIES           PROPERTY(KnownMove)
#define STEP_FLAGS                FLAG(WALK) FLAG(AFTER) FLAG(TELL)
#endif
#define IF(flag)                  c_expr { flag }

/* Never written, and no part of the state: names for the text of assertions. */
#define PROPERTY(name) hidden byte name;
PROPERTIES
#undef PROPERTY

c_decl {
\#include <stdio.h>
\#include <stdlib.h>
\#include <string.h>
#define FLAG(name) static int name;
  FLAGS
#undef FLAG
#define PROPERTY(name) static int skip_##name;
  PROPERTIES
#undef PROPERTY
  struct named { const char* name; int* value; };
#define FLAG(name) { #name, &name },
  static const struct named knobs[] = { FLAGS { 0, 0 } };
#undef FLAG
#define PROPERTY(name) { #name, &skip_##name },
  static const struct named skips[] = { PROPERTIES { 0, 0 } };
#undef PROPERTY
  enum { MOST_MARKS = 128 };
  static const char* marks[MOST_MARKS];
  static const char* goal = NULL;
  static int mark_count = 0;

  static void fail(const char* what, const char* name) {
    printf("Error: %s %s\n", what, name);
    exit(2);
  }

  static void reach(const char* name) {
    int k;
    for (k = 0; k < mark_count; k++) {
      if (marks[k] == name) return;
    }
    if (mark_count == MOST_MARKS) fail("no room for mark", name);
    marks[mark_count++] = name;
  }

  static int is_goal(const char* name) {
    return goal && strcmp(goal, name) == 0;
  }

  static void report(void) {
    int k;
    for (k = 0; k < mark_count; k++) printf("reached: %s\n", marks[k]);
  }

  static void set_knob(char* word) {
    char* value = strchr(word, '=');
    const struct named* at;
    if (value) *value++ = 0;
    if (strcmp(word, "ONLY") == 0 && value) {
      for (at = skips; at->name; at++) *at->value = strcmp(at->name, value) != 0;
      return;
    }
    if (strcmp(word, "GOAL") == 0 && value) {
      goal = strdup(value);
      return;
    }
    for (at = knobs; at->name && strcmp(at->name, word) != 0; at++) {}
    if (!at->name) fail("no knob", word);
    *at->value = value ? atoi(value) : 1;
  }

  /* Before anything of the checker runs. */
  __attribute__((constructor)) static void load_knobs(void) {
    const char* given = getenv("KNOBS");
    char* copy = strdup(given ? given : "");
    char* word;
    for (word = strtok(copy, " "); word; word = strtok(NULL, " ")) set_knob(word);
    free(copy);
    atexit(report);
  }
}
