import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { arrive, pawl } from "./state";

const FAULTS: Record<string, string> = {
  refused: "Login failed. Try again.",
  unavailable: "The identity provider is not responding. Try again later.",
};

export function Login(): VNode {
  const key = useRef<HTMLInputElement>(null);
  const [fault, setFault] = useState("");
  const [busy, setBusy] = useState(false);
  const [logins, setLogins] = useState<{ name: string; title: string }[]>([]);

  const enter = async (login: Parameters<typeof pawl.logIn>[0]): Promise<void> => {
    setBusy(true);
    try {
      await pawl.logIn(login);
      await arrive();
    } catch (error) {
      setFault(error instanceof Error ? error.message : String(error));
      setBusy(false);
      key.current?.focus();
    }
  };
  const follow = (): void => {
    const params = new URLSearchParams(location.hash.slice(1));
    const [code, fault] = [params.get("code"), FAULTS[params.get("login") ?? ""]];
    if (code || fault) history.replaceState(null, "", location.pathname + location.search);
    setFault(fault ?? "");
    if (code) void enter({ code });
    else key.current?.focus();
  };
  useEffect(() => {
    fetch("/login/providers").then(async (answer) => setLogins((await answer.json()).providers), () => {});
    follow();
    // A link with only a new hash does not reload the page.
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);

  return (
    <main class="login">
      <form onSubmit={(event) => (event.preventDefault(), void enter({ key: key.current?.value ?? "" }))}>
        <h1><img src="/icon.svg" alt="" width={28} height={28} /> Log in to Pawl</h1>
        {logins.map(({ name, title }) => (
          <a key={name} class="button" target="_self" href={`/login/openid/${name}?to=${encodeURIComponent(location.pathname + location.search)}`}>{title}</a>
        ))}
        <label for="key">Your key</label>
        <input id="key" ref={key} type="password" autocomplete="current-password" placeholder="pawl_..." required />
        {fault && <p role="alert" class="fault">{fault}</p>}
        <button disabled={busy}>Log in</button>
        <p class="quiet">On this machine, <code>pawl console</code> opens this page and logs you in.</p>
      </form>
    </main>
  );
}
