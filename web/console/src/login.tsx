import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { arrive, pawl } from "./state";

export function Login(): VNode {
  const key = useRef<HTMLInputElement>(null);
  const [fault, setFault] = useState("");
  const [busy, setBusy] = useState(false);

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
  useEffect(() => {
    const code = new URLSearchParams(location.hash.slice(1)).get("code");
    if (code) {
      history.replaceState(null, "", location.pathname);
      void enter({ code });
    } else key.current?.focus();
  }, []);

  return (
    <main class="login">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void enter({ key: key.current?.value ?? "" });
        }}
      >
        <h1>Pawl</h1>
        <label for="key">Your key</label>
        <input id="key" ref={key} type="password" autocomplete="current-password" required />
        {fault && <p role="alert" class="fault">{fault}</p>}
        <button disabled={busy}>Log in</button>
        <p class="quiet">
          On this machine <code>pawl console</code> opens this page and logs you in.
        </p>
      </form>
    </main>
  );
}
