import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import type { BackgroundJobJson } from "../../client/gen/pawl/agent/v1/jobs_pb";
import { plain } from "./markdown";
import { ago, attempt, fresh, may, moment, pawl, word } from "./state";

export function Background(): VNode {
  const [jobs, setJobs] = useState<BackgroundJobJson[]>();
  const [all, setAll] = useState(false);
  const load = (): void =>
    void attempt(async () => setJobs((await pawl.jobs.listJobs({ pageSize: 100, openOnly: !all })).jobs ?? []));
  useEffect(() => {
    load();
    const timer = setInterval(() => !document.hidden && load(), 2000);
    return () => clearInterval(timer);
  }, [all]);
  const stop = (job: BackgroundJobJson): void =>
    void attempt(async () => {
      await pawl.jobs.stopJob({ requestId: fresh(), jobId: job.jobId ?? "" });
      load();
    });
  return (
    <section class="page">
      <h1>Background</h1>
      <label class="row">
        <input type="checkbox" checked={all} onChange={(event) => setAll(event.currentTarget.checked)} /> also what has ended
      </label>
      {jobs?.length === 0 && (
        <p class="empty">Nothing goes on in the background. Ask for something that takes long, or that is to be watched, and it stands here.</p>
      )}
      {jobs?.map((job) => (
        <article key={job.jobId} class="card" data-job={job.jobId}>
          <header>
            <strong>{plain(job.definition?.toolName ?? "")}</strong>
            <span class={`chip ${job.state ?? ""}`}>{word(job.state)}</span>
            <span class="quiet">
              {job.definition?.intervalSeconds ? `every ${job.definition.intervalSeconds} s · ` : ""}
              {progress(job)}
              {job.nextTime ? ` · next ${ago(job.nextTime)}` : ""}
            </span>
          </header>
          {job.waiting?.sentence && <p class="quiet">{plain(job.waiting.sentence)}</p>}
          {job.lastResult && <p class="cut">{plain(job.lastResult).slice(0, 300)}</p>}
          <p class="buttons">
            <a href={`/runs/${job.jobId}`}>its run</a>
            <a href={`/c/${job.conversationId}`}>its conversation</a>
            <time class="quiet" title={moment(job.createTime)}>{ago(job.createTime)}</time>
            {!job.endTime && may("agent.v1.JobService/StopJob") && (
              <button class="second bad" onClick={() => stop(job)}>
                Stop
              </button>
            )}
          </p>
        </article>
      ))}
    </section>
  );
}

function progress(job: BackgroundJobJson): string {
  const most = job.definition?.iterationsMax ?? 1;
  return most > 1 ? `${job.iterations ?? 0} of ${most}` : "";
}
