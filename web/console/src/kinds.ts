/** The kinds of notifications, as sentences. */

import type { NotificationKindJson } from "@pawl/client";

export const KINDS: [NotificationKindJson, string][] = [
  ["NOTIFICATION_KIND_APPROVAL_NEEDED", "A call of mine needs an approval"],
  ["NOTIFICATION_KIND_DECISION_NEEDED", "Someone else's call needs my decision"],
  ["NOTIFICATION_KIND_INPUT_NEEDED", "A run asks me a question"],
  ["NOTIFICATION_KIND_JOB_ENDED", "A background job ended"],
  ["NOTIFICATION_KIND_RUN_COMPLETED", "A run completed"],
  ["NOTIFICATION_KIND_RUN_FAILED", "A run failed"],
  ["NOTIFICATION_KIND_RUN_CANCELLED", "A run was stopped"],
  ["NOTIFICATION_KIND_RUN_EXPIRED", "A run took too long"],
  ["NOTIFICATION_KIND_ATTENTION_NEEDED", "A run needs an operator"],
  ["NOTIFICATION_KIND_CHANNEL_DISABLED", "A channel was switched off"],
];
