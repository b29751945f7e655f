/** Decisions about calls. */

import { type CallDecisionJson, type CallJson, type DecisionJson, requestId } from "@pawl/client";

import { attempt, may, notice, pawl, who } from "./state";

const DECISIONS_MAX = 64;
const CORRECTABLE = new Set(["INVALID_ARGUMENTS", "INVALID_FIELD", "INVALID_JSON", "TOO_LARGE"]);

export type Decision = Omit<CallDecisionJson, "runId" | "callId">;

/**
 * Decides on a call; true if the decision was accepted. Correctable faults go to `onFault`. If another tab or user decided
 * first, a notice explains this, because the card disappears.
 */
export function decideCall(call: CallJson, decision: Decision, onFault: (message: string) => void): Promise<boolean> {
  return decideAll([call], () => decision, onFault);
}

export const made = new Map<string, DecisionJson>();

/** Decides on several calls, at most 64 per request; true if all decisions were accepted. */
export async function decideAll(calls: CallJson[], decision: (call: CallJson) => Decision, onFault?: (message: string) => void): Promise<boolean> {
  const done = await attempt(async () => {
    const refused = [];
    for (let start = 0; start < calls.length; start += DECISIONS_MAX) {
      const decisions = calls.slice(start, start + DECISIONS_MAX).map((call) => ({ runId: call.runId ?? "", callId: call.callId ?? "", ...decision(call) }));
      const { receipts = [] } = await pawl.agent.decideCalls({ requestId: requestId(), decisions });
      refused.push(...receipts.filter(({ status }) => status !== "RECEIPT_STATUS_ACCEPTED" && status !== "RECEIPT_STATUS_DUPLICATE"));
      const [userId, time] = [who.value?.caller?.userId ?? "", new Date().toISOString()];
      receipts.forEach(({ status }, at) => {
        const { callId = "", kind, reason = "" } = decisions[at] ?? {};
        if (status === "RECEIPT_STATUS_ACCEPTED" && kind) made.set(callId, { kind, reason, userId, time });
      });
    }
    const [first] = refused;
    if (!first) return true;
    if (onFault && first.status === "RECEIPT_STATUS_REFUSED" && CORRECTABLE.has(first.reason ?? "")) return void onFault(first.message ?? "");
    throw new Error(`${calls.length > 1 ? `${refused.length} of ${calls.length} decisions were not accepted. ` : ""}${first.message || "This call has already been decided."}`);
  });
  return done ?? false;
}

export type Scope = "RULE_SCOPE_RUN" | "RULE_SCOPE_CONVERSATION" | "RULE_SCOPE_USER";

/** Rules apply to your own runs, and not to calls that need several approvers. */
export function canRemember({ userId, approval }: CallJson): boolean {
  const own = !userId || userId === who.value?.caller?.userId;
  return own && (approval?.approvalsRequired ?? 1) <= 1 && may("tool.v1.RuleService/CreateRule");
}

/** Creates a rule that allows the tool, then approves the call; if that fails, revokes the rule. */
export async function approveWithRule({ toolName = "", callId = "", runId = "", conversationId = "" }: CallJson, scope: Scope | "", approve: () => Promise<boolean>): Promise<void> {
  if (!scope) return void (await approve());
  const scopeId = { RULE_SCOPE_RUN: runId, RULE_SCOPE_CONVERSATION: conversationId, RULE_SCOPE_USER: "" }[scope];
  const rule = { effect: "RULE_EFFECT_ALLOW" as const, scope, scopeId, toolName, callId };
  const made = await attempt(() => pawl.rules.createRule({ requestId: requestId(), rule }));
  if (!made || (await approve())) return;
  const error = notice.value;
  await attempt(() => pawl.rules.revokeRule({ ruleId: made.rule?.ruleId ?? "" }));
  notice.value ||= error;
}
