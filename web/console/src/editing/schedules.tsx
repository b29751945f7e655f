/** Schedules: their list, and the form with the times in words. */

import { requestId, type ScheduleFireJson, type ScheduleJson } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { askedIn } from "../about";
import { type Action, removal } from "../actions";
import { Badge, type Tone, toneOf } from "../design/parts";
import { Table } from "../design/table";
import { type FieldSpec, type Option, Options, set, type Values } from "../fields";
import { cut, day, short, span, time } from "../format";
import { type Resource, useRead } from "../resource";
import { ago, pawl, word } from "../state";
import { visible } from "../visible";
import { agentOptions, workflowOptions } from "./options";

type Paused = Pick<ScheduleJson, "pauseTime" | "pauseNote" | "selfPaused">;

export const paused = ({ pauseTime }: Paused): VNode => <Badge tone={pauseTime ? "grey" : "ok"}>{pauseTime ? "paused" : "active"}</Badge>;

/** Shows since when and why a schedule or trigger is paused. */
export function Pause({ pauseTime, pauseNote, selfPaused }: Paused): VNode | null {
  if (!pauseTime) return null;
  return <div class="why"><strong>Paused {selfPaused ? "automatically " : ""}{ago(pauseTime)}</strong>{pauseNote && <p>{visible(pauseNote)}</p>}</div>;
}

const zoneOf = (definition: ScheduleJson["definition"]): string => definition?.timeZone || "UTC";

/** The agent or workflow that a schedule or trigger starts. */
export function Starts({ of: { workflow, agent } = {} }: { of: { workflow?: string; agent?: string } | undefined }): VNode {
  return <a href={workflow ? `/workflows/${workflow}` : `/agents/${agent || "default"}`}>{workflow ? "workflow" : "agent"} {workflow || agent || "default"}</a>;
}

const OUTCOMES: Record<string, Tone> = { SCHEDULE_FIRE_OUTCOME_STARTED: "info", SCHEDULE_FIRE_OUTCOME_WAITING: "info", SCHEDULE_FIRE_OUTCOME_REFUSED: "bad", SCHEDULE_FIRE_OUTCOME_MISSED: "warn" };

/** The outcome of a firing: the state of its run, or why no run started. */
function Came({ of: { outcome, runState } }: { of: ScheduleFireJson }): VNode {
  return runState ? <Badge tone={toneOf(runState)}>{word(runState)}</Badge> : <Badge tone={OUTCOMES[outcome ?? ""] ?? "grey"}>{short(outcome, "SCHEDULE_FIRE_OUTCOME_")}</Badge>;
}

/** The last firings of a schedule or trigger. */
export function Fires({ all }: { all: ScheduleFireJson[] }): VNode {
  return (
    <Table
      name="Fires"
      items={all}
      to={({ runId }) => (runId ? `/runs/${runId}` : undefined)}
      columns={[
        { name: "Run", of: ({ runId, conversationId = "" }) => (runId ? askedIn(conversationId, runId) || `Run ${runId.slice(-8)}` : "No run"), under: ({ reason, triggered }) => cut(reason) || (triggered && "Started by hand") },
        { name: "State", size: 180, priority: 1, of: (fire) => <Came of={fire} /> },
        { name: "Due", size: 120, priority: 1, num: true, of: ({ dueTime }) => time(dueTime) },
      ]}
    />
  );
}

/** The last firing, for a list without a firing of its own. */
export function Last({ read }: { read: () => Promise<ScheduleFireJson[] | undefined> }): VNode | null {
  const [all] = useRead(read);
  const [fire] = all ?? [];
  if (!fire) return all ? <span class="quiet">never</span> : null;
  return <><Came of={fire} /> <small class="quiet">{time(fire.dueTime)}</small></>;
}

const OVERLAP_NAMES = { SKIP: "Skip the new run", QUEUE: "Wait, then start the new run", ALLOW: "Run both at the same time", CANCEL: "Stop the previous run" };
export const OVERLAPS: Option[] = [["", "The default"], ...Object.entries(OVERLAP_NAMES).map(([name, text]): Option => [`SCHEDULE_OVERLAP_${name}`, text])];

/** Fields for the run that a firing starts. */
export const STARTS: FieldSpec[] = [
  { at: "workflow", label: "Starts", kind: "select", half: true, load: workflowOptions, options: [["", "A run of an agent"]] },
  { at: "agent", label: "Agent", kind: "select", half: true, load: agentOptions, options: [["", "The default agent"]], when: ({ workflow }) => !workflow },
  { at: "inputJson", label: "Input of the workflow", kind: "json", when: ({ workflow }) => !!workflow },
];
/** Removes the fields that are not allowed with a workflow. */
export function cleaned({ text, agent, conversationKey, conversationPointer, inputJson, ...rest }: Values): Values {
  return rest["workflow"] ? { ...rest, ...(inputJson === undefined ? {} : { inputJson }) } : { text, agent, conversationKey, conversationPointer, ...rest };
}

const DAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const REPEATS = [["daily", "Every day"], ["weekdays", "Every weekday"], ["weekly", "Every week"], ["monthly", "Every month"], ["interval", "At an interval"], ["cron", "By a cron expression"]] as const;
/** Plural days, and the words for a simple cron expression. Others are in the words of the server. */
function wordsOf({ cron = "", intervalSeconds = 0 }: Values, cronText = ""): string {
  const [minute = "", hour = "", day, , weekday = ""] = cron.split(" ");
  const at = `at ${hour.padStart(2, "0")}:${minute.padStart(2, "0")}`;
  switch (repeatOf({ cron, intervalSeconds })) {
    case "interval": return `Every ${span(intervalSeconds)}`;
    case "daily": return `Every day ${at}`;
    case "weekdays": return `Weekdays ${at}`;
    case "weekly": return `${DAYS[Number(weekday) % 7]}s ${at}`;
    case "monthly": return `Monthly on day ${day} ${at}`;
    default: return cronText || cron;
  }
}

const UNITS = [[60, "minutes"], [3600, "hours"], [86_400, "days"]] as const;

function repeatOf({ cron = "", intervalSeconds = 0 }: Values): string {
  if (intervalSeconds) return "interval";
  const [, day, weekday] = /^\d+ \d+ (\*|\d+) \* (\*|\d|1-5)$/.exec(cron) ?? [];
  if (!day || !weekday) return "cron";
  return weekday === "1-5" && day === "*" ? "weekdays" : weekday !== "*" && day === "*" ? "weekly" : weekday === "*" && day !== "*" ? "monthly" : weekday === "*" ? "daily" : "cron";
}

/** When a schedule fires, with the next time as the server understands it. */
function When({ value, onValue, id }: { value: Values; onValue: (value: Values) => void; id: string }): VNode {
  const [repeat, setRepeat] = useState(() => repeatOf(value));
  const cron: string = value["cron"] ?? "";
  const [minute = "0", hour = "9", day = "*", , weekday = "*"] = cron.split(" ");
  const at = `${hour.padStart(2, "0")}:${minute.padStart(2, "0")}`;
  const write = (kind: string, { time: clock = /^\d\d:\d\d$/.test(at) ? at : "09:00", day: on = day, weekday: week = weekday } = {}): void => {
    const [hours, minutes] = clock.split(":").map(Number);
    const tail = kind === "daily" ? "* * *" : kind === "weekdays" ? "* * 1-5" : kind === "weekly" ? `* * ${/^\d$/.test(week) ? week : 1}` : `${/^\d+$/.test(on) ? on : 1} * *`;
    onValue(set(set(value, "intervalSeconds", undefined), "cron", `${minutes} ${hours} ${tail}`));
  };
  const choose = (to: string): void => {
    setRepeat(to);
    if (to === "interval") onValue(set(set(value, "cron", undefined), "intervalSeconds", value["intervalSeconds"] ?? 3600));
    else if (to !== "cron") write(to);
    else onValue(set(set(value, "intervalSeconds", undefined), "cron", cron || "0 9 * * *"));
  };
  const seconds: number = value["intervalSeconds"] ?? 3600;
  const [unit] = UNITS.findLast(([size]) => seconds % size === 0) ?? [60];
  return (
    <>
      <div class="when">
        <select aria-label="Repeat" value={repeat} onChange={(event) => choose(event.currentTarget.value)}><Options all={REPEATS} /></select>
        {repeat === "weekly" && (
          <select aria-label="Day of the week" value={weekday} onChange={(event) => write(repeat, { weekday: event.currentTarget.value })}>
            <Options all={DAYS.map((name, index) => [index, name] as const)} />
          </select>
        )}
        {repeat === "monthly" && <input type="number" aria-label="Day of the month" min={1} max={31} value={day} onInput={(event) => write(repeat, { day: event.currentTarget.value })} />}
        {repeat === "interval" && (
          <>
            <input type="number" aria-label="Interval" min={1} value={seconds / unit} onInput={(event) => onValue(set(value, "intervalSeconds", Math.round((event.currentTarget.valueAsNumber || 1) * unit)))} />
            <select aria-label="Unit" value={unit} onChange={(event) => onValue(set(value, "intervalSeconds", (seconds / unit) * Number(event.currentTarget.value)))}>
              <Options all={UNITS} />
            </select>
          </>
        )}
        {repeat === "cron" && <input id={id} aria-label="Cron expression" class="code" value={cron} onInput={(event) => onValue(set(value, "cron", event.currentTarget.value || undefined))} />}
        {!["interval", "cron"].includes(repeat) && <input type="time" aria-label="Time" required value={at} onInput={(event) => event.currentTarget.value && write(repeat, { time: event.currentTarget.value })} />}
      </div>
      <Preview value={value} />
    </>
  );
}

const PAUSE_MS = 300;

/** The next time and the words for it, from the server's check of the definition. */
function Preview({ value: { cron, timeZone, intervalSeconds } }: { value: Values }): VNode {
  const [found, setFound] = useState<ScheduleJson>();
  const [fault, setFault] = useState("");
  useEffect(() => {
    let isStale = false;
    const definition = { name: "preview_of_a_form", text: "preview", cron: cron ?? "", timeZone: timeZone ?? "", intervalSeconds: intervalSeconds ?? 0 };
    const timer = setTimeout(
      () =>
        pawl.schedules.createSchedule({ definition, validateOnly: true }).then(
          ({ schedule }) => isStale || (setFound(schedule), setFault("")),
          (error: Error) => isStale || (setFound(undefined), setFault(error.message)),
        ),
      PAUSE_MS,
    );
    return () => void ((isStale = true), clearTimeout(timer));
  }, [cron, timeZone, intervalSeconds]);
  if (fault) return <span class="hint fault">{visible(fault)}</span>;
  const times = found?.nextTimes?.length ? found.nextTimes : found?.nextTime ? [found.nextTime] : [];
  return (
    <span class="hint" role="note">
      {found && `${wordsOf({ cron, intervalSeconds }, found.cronText)}. Next: ${times.slice(0, 3).map((at) => day(at, timeZone || "UTC")).join("; ")} (${timeZone || "UTC"}).`}
    </span>
  );
}

const zones = async (): Promise<Option[]> => Intl.supportedValuesOf("timeZone").map((zone) => [zone, ""]);
const FIELDS: FieldSpec[] = [
  ...STARTS,
  { at: "text", label: "Message", kind: "area", when: ({ workflow }) => !workflow },
  { at: "cron", label: "When", kind: "own", view: (props) => <When {...props} /> },
  { at: "timeZone", label: "Time zone", kind: "suggest", half: true, load: zones, when: ({ intervalSeconds }) => !intervalSeconds },
  { at: "overlap", label: "If the previous run has not ended", kind: "select", half: true, options: OVERLAPS },
  { at: "conversationKey", label: "Conversation key", more: true, half: true, hint: "Runs with the same key share a conversation.", when: ({ workflow }) => !workflow },
  { at: "catchUpSeconds", label: "Catch up (seconds)", kind: "number", more: true, half: true, placeholder: "3600", hint: "How late a missed time may still fire." },
  { at: "jitterSeconds", label: "Spread (seconds)", kind: "number", more: true, half: true, hint: "Maximum delay that spreads the load." },
  { at: "offsetSeconds", label: "Offset (seconds)", kind: "number", more: true, half: true, when: ({ intervalSeconds }) => !!intervalSeconds },
];
const NAME: FieldSpec = { at: "name", label: "Name", hint: "Letters, digits, - and _." };

/** Actions that pause, resume and delete a schedule or trigger. */
export function lifeOf<T extends { definition?: { name?: string }; pauseTime?: string }>(
  kind: "Schedule" | "Trigger",
  pause: (request: { name: string; note: string }) => Promise<unknown>,
  resume: (request: { name: string }) => Promise<unknown>,
  remove: (request: { name: string }) => Promise<unknown>,
): Action<T>[] {
  const method = (verb: string): string => `agent.v1.${kind}Service/${verb}${kind}`;
  const nameOf = ({ definition }: T): string => definition?.name ?? "";
  return [
    { name: "Pause", method: method("Pause"), when: ({ pauseTime }) => !pauseTime, ask: "Reason (optional)", run: (item, note) => pause({ name: nameOf(item), note }) },
    { name: "Resume", method: method("Resume"), main: true, when: ({ pauseTime }) => !!pauseTime, run: (item) => resume({ name: nameOf(item) }) },
    removal("Delete", method("Delete"), (item) => remove({ name: nameOf(item) })),
  ];
}

export const schedules: Resource<ScheduleJson> = {
  path: "schedules",
  lead: "A schedule starts a run at set times, with your permissions.",
  declared: ({ definition }) => ["schedule", definition?.name ?? ""],
  empty: "No schedules. Create one here or with pawl schedules create.",
  list: async () => ({ items: (await pawl.schedules.listSchedules({})).schedules ?? [] }),
  id: ({ definition }) => definition?.name ?? "",
  get: async (name) => (await pawl.schedules.getSchedule({ name })).schedule,
  about: ({ definition: { text, workflow } = {} }) => (workflow ? undefined : text),
  columns: [
    { name: "Name", icon: () => "schedules", of: ({ definition }) => definition?.name, under: ({ definition }) => <Starts of={definition} /> },
    { name: "When", size: 230, priority: 2, of: ({ definition = {}, cronText }) => wordsOf(definition, cronText), under: ({ definition }) => definition?.cron && zoneOf(definition) },
    { name: "Time zone", detailed: true, of: ({ definition }) => definition?.cron && zoneOf(definition) },
    { name: "State", size: 92, priority: 1, of: paused },
    { name: "Next", size: 210, priority: 1, by: ({ nextTime = "" }) => nextTime, of: ({ nextTime, definition }) => nextTime && day(nextTime, zoneOf(definition)), under: ({ nextTime, pauseNote }) => time(nextTime) ?? cut(pauseNote) },
    { name: "Last firing", size: 190, priority: 3, listed: true, of: ({ definition: { name = "" } = {} }) => <Last read={async () => (await pawl.schedules.getSchedule({ name })).schedule?.fires ?? []} /> },
    { name: "Starts", detailed: true, of: ({ definition }) => <Starts of={definition} /> },
    { name: "Failures in a row", detailed: true, of: ({ failures }) => failures },
  ],
  make: {
    name: "New schedule", method: "agent.v1.ScheduleService/CreateSchedule",
    value: () => ({ name: "", text: "", cron: "0 9 * * 1-5", timeZone: Intl.DateTimeFormat().resolvedOptions().timeZone }),
    save: async (definition) => void (await pawl.schedules.createSchedule({ definition: cleaned(definition) })),
    fields: [NAME, ...FIELDS],
  },
  edit: {
    name: "Edit schedule", method: "agent.v1.ScheduleService/UpdateSchedule", value: ({ definition }) => definition,
    save: async (definition) => void (await pawl.schedules.updateSchedule({ definition: cleaned(definition) })),
    fields: FIELDS,
  },
  actions: [
    {
      name: "Run now", method: "agent.v1.ScheduleService/TriggerSchedule",
      run: async ({ definition }) => {
        const { fire } = await pawl.schedules.triggerSchedule({ name: definition?.name ?? "", requestId: requestId() });
        return `Outcome: ${short(fire?.outcome, "SCHEDULE_FIRE_OUTCOME_")}.`;
      },
    },
    ...lifeOf<ScheduleJson>("Schedule", pawl.schedules.pauseSchedule, pawl.schedules.resumeSchedule, pawl.schedules.deleteSchedule),
  ],
  below: (schedule) => {
    const { fires = [], nextTimes = [], pauseTime, definition } = schedule;
    return (
      <>
        <Pause {...schedule} />
        <h2>Firings</h2>
        {fires.length ? <Fires all={fires} /> : <p class="quiet">Not fired yet.</p>}
        {!!nextTimes.length && (
          <details class="next" open={!pauseTime}>
            <summary>{pauseTime ? "Next times after a resume" : "Next times"} <small class="quiet">{zoneOf(definition)}</small></summary>
            <ol class="times">{nextTimes.map((at) => <li key={at}>{day(at, zoneOf(definition))}</li>)}</ol>
          </details>
        )}
      </>
    );
  },
};
