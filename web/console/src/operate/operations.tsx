/** Operations: runs, failures, durations and tokens over time, by agent and by tool. */

import type { GetUsageRequestJson, UsageDimensionJson, UsageFiguresJson, UsageRowJson } from "@pawl/client";
import type { ComponentChildren, VNode } from "preact";

import { Empty, Head, Skeleton, Tabs } from "../design/parts";
import { type Column, Table } from "../design/table";
import { tokenCount } from "../format";
import { useRead } from "../resource";
import { go, lasted, pawl, query, who } from "../state";
import { visible } from "../visible";

const [HOUR_MS, DAY_MS, LIVE_MS] = [3_600_000, 86_400_000, 30_000];
/** ID, name, number of bars, and their length. */
const PERIODS = [["24h", "24 hours", 24, HOUR_MS], ["7d", "7 days", 7, DAY_MS], ["30d", "30 days", 30, DAY_MS]] as const;

/** Figures of a bar or of a row. Runs and calls count when they end. */
interface Sum { name: string; runs: number; completed: number; failed: number; seconds: number; calls: number; callsFailed: number; callSeconds: number; tokens: number }
interface Found { total: Sum; bars: Sum[]; agents: Sum[]; tools: Sum[] }

function sum(name: string, rows: UsageRowJson[]): Sum {
  const all = (...names: Exclude<keyof UsageFiguresJson, "usage">[]): number => rows.reduce((so, { figures }) => names.reduce((far, each) => far + Number(figures?.[each] ?? 0), so), 0);
  return {
    name, runs: all("runsCompleted", "runsFailed", "runsExpired", "runsCancelled"),
    completed: all("runsCompleted"), failed: all("runsFailed", "runsExpired"), seconds: all("runSeconds"),
    calls: all("callsSucceeded", "callsFailed", "callsRefused"),
    callsFailed: all("callsFailed"), callSeconds: all("callSeconds"),
    tokens: rows.reduce((so, { figures }) => so + tokenCount(figures?.usage), 0),
  };
}

function grouped(rows: UsageRowJson[], by: "agentName" | "toolName"): Sum[] {
  const names = [...new Set(rows.map((row) => row[by] ?? ""))];
  return names.map((name) => sum(name, rows.filter((row) => (row[by] ?? "") === name))).sort((one, other) => other.runs - one.runs || other.calls - one.calls);
}

async function pages(request: GetUsageRequestJson): Promise<UsageRowJson[]> {
  const { rows = [], nextPageToken: pageToken } = await pawl.usage.getUsage({ ...request, pageSize: 200 });
  return pageToken ? [...rows, ...(await pages({ ...request, pageToken }))] : rows;
}

async function read([, , count, length]: (typeof PERIODS)[number]): Promise<Found> {
  const now = Math.floor(Date.now() / length) * length;
  const starts = Array.from({ length: count }, (_, index) => now - (count - 1 - index) * length);
  const asked: GetUsageRequestJson = { fromTime: new Date(starts[0]!).toISOString(), period: length === HOUR_MS ? "USAGE_PERIOD_HOUR" : "USAGE_PERIOD_DAY" };
  // Figures without a period cover whole days.
  const of = (dimension: UsageDimensionJson): Promise<UsageRowJson[]> => pages({ ...asked, by: [dimension], ...(length === DAY_MS ? { period: "USAGE_PERIOD_UNSPECIFIED" } : {}) });
  const [rows, agents, tools] = await Promise.all([pages(asked), of("USAGE_DIMENSION_AGENT"), of("USAGE_DIMENSION_TOOL")]);
  const label = (start: number): string => new Date(start).toLocaleString("en", length === HOUR_MS ? { hour: "2-digit", minute: "2-digit", hourCycle: "h23" } : { day: "numeric", month: "short", timeZone: "UTC" });
  return { total: sum("", rows), bars: starts.map((start) => sum(label(start), rows.filter(({ time = "" }) => Date.parse(time) === start))), agents: grouped(agents, "agentName"), tools: grouped(tools, "toolName") };
}

const text = (count: number): string => count.toLocaleString();
const rate = ({ completed, failed }: Sum): number => (completed + failed ? completed / (completed + failed) : NaN);
const percent = (share: number): string => `${Math.min(Math.round(share * 1000) / 10, share < 1 ? 99.9 : 100).toFixed(1)}%`;
const mean = (seconds: number, count: number): string => (count ? lasted(seconds / count) : "");

const AGENTS: Column<Sum>[] = [
  { name: "Agent", of: ({ name }) => name || "default" },
  { name: "Runs", size: 64, num: true, of: ({ runs }) => text(runs) },
  { name: "Failed", size: 64, num: true, of: ({ name, failed }) => (failed ? <a href={`/runs?state=failed&agent=${name}`}>{text(failed)}</a> : 0) },
  { name: "Mean duration", size: 112, num: true, of: ({ seconds, runs }) => mean(seconds, runs) },
  { name: "Tokens", size: 112, num: true, priority: 2, of: ({ tokens }) => text(tokens) },
];
const TOOLS: Column<Sum>[] = [
  { name: "Tool", of: ({ name }) => (name === "?" ? "Unknown tools" : <a href={`/tools/${encodeURIComponent(name)}`}>{visible(name)}</a>) },
  { name: "Calls", size: 64, num: true, of: ({ calls }) => text(calls) },
  { name: "Failed", size: 64, num: true, of: ({ name, callsFailed }) => (callsFailed ? <a href={`/audit?tool=${encodeURIComponent(name)}&kind=RETURNED`}>{text(callsFailed)}</a> : 0) },
  { name: "Mean duration", size: 112, num: true, of: ({ callSeconds, calls }) => mean(callSeconds, calls) },
];

export function Operations(): VNode {
  const period = PERIODS.find(([id]) => id === query.value.get("period")) ?? PERIODS[0];
  const [found] = useRead(() => read(period), [period], LIVE_MS);
  return (
    <section class="page">
      <Head title="Operations" />
      <p class="lead">Figures of the runs and calls that ended in the period, by agent and tool. Days are in UTC. {!who.value?.caller?.roles?.some((role) => role === "admin" || role === "deployment") && "You see only your own figures. Admins see the figures of all users."}</p>
      <Tabs name="Period" all={PERIODS.map(([id, name]) => [id, name] as const)} open={period[0]} onOpen={(id) => go(`/operations?period=${id}`)} />
      {found ? <Figures {...found} /> : <Skeleton />}
    </section>
  );
}

function Figures({ total, bars, agents, tools }: Found): VNode {
  if (!total.runs && !total.calls && !total.tokens) return <Empty icon="operations"><p>No runs ended in this period.</p></Empty>;
  return (
    <>
      <div class="charts">
        <Bars title="Runs" total={text(total.runs)} bars={bars} of={({ runs }) => runs} bad={({ failed }) => failed} show={text}>
          {total.failed > 0 && <a class="fault" href="/runs?state=failed">{text(total.failed)} failed</a>}
        </Bars>
        <Bars title="Success rate" total={total.completed + total.failed ? percent(rate(total)) : "–"} bars={bars} of={rate} most={1} show={percent} isLine />
        <Bars title="Mean duration" total={mean(total.seconds, total.runs) || "–"} bars={bars} of={({ seconds, runs }) => seconds / runs} show={lasted} isLine />
        <Bars title="Tokens" total={text(total.tokens)} bars={bars} of={({ tokens }) => tokens} show={text} />
      </div>
      <div class="halves">
        <div><h2>Agents</h2><Table name="Agents" columns={AGENTS} items={agents} to={({ name }) => `/runs?agent=${name}`} /></div>
        <div><h2>Tools</h2>{tools.length ? <Table name="Tools" columns={TOOLS} items={tools} /> : <p class="quiet">No calls ended in this period.</p>}</div>
      </div>
    </>
  );
}

/** A chart over time: bars for counts, points for measurements. A period without a value has a tick on the axis. */
function Bars({ title, total, bars, of, bad = () => 0, most, show, isLine, children }: { title: string; total: string; bars: Sum[]; of: (sum: Sum) => number; bad?: (sum: Sum) => number; most?: number; show: (value: number) => string; isLine?: true; children?: ComponentChildren }): VNode {
  const values = bars.map(of);
  const top = most ?? (Math.max(...values.filter(isFinite)) || 1);
  const hasPlot = values.filter(Boolean).length > 2;
  const texts = bars.map((bar, index) => `${bar.name}: ${isFinite(values[index]!) ? show(values[index]!) : "none"}${bad(bar) ? `, ${bad(bar)} failed` : ""}`);
  return (
    <figure class="panel">
      <figcaption><span class="quiet">{title}</span><span class="row"><strong>{total}</strong><small>{children}</small></span></figcaption>
      {hasPlot && <div class={`plot ${isLine ? "line" : ""}`} role="img" aria-label={`${title}. ${texts.filter((_, index) => isFinite(values[index]!)).join(". ")}`}>
        {bars.map((bar, index) => (
          <div key={index} title={texts[index]} class={values[index] ? "" : "none"}>
            <i style={{ height: `${(100 * ((values[index] || 0) - bad(bar))) / top}%` }} />
            <i class="bad" style={{ height: `${(100 * bad(bar)) / top}%` }} />
          </div>
        ))}
      </div>}
      {hasPlot && <p class="row"><small>{bars[0]!.name}</small><span class="space" />{values.some(Boolean) && <small>{most ? "top" : "highest"}: {show(top)}</small>}<span class="space" /><small>{bars.at(-1)!.name}</small></p>}
    </figure>
  );
}
