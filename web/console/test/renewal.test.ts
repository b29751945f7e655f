import { expect, it, vi } from "vitest";

import { Pawl } from "@pawl/client";

it("a refused lock fails only the waiting calls, with their own error", async () => {
  const over = { code: "unauthenticated", details: [{ debug: { reason: "SESSION_EXPIRED" } }] };
  let isRenewed = false;
  const fetch = async (url: unknown): Promise<Response> => {
    isRenewed ||= String(url).endsWith("/renew");
    return Response.json(isRenewed ? {} : over, { status: isRenewed ? 200 : 401 });
  };
  const refused = Promise.reject(new Error("no locks here"));
  const request = vi.fn((_name: string, renew: () => Promise<boolean>) => renew()).mockReturnValueOnce(refused);
  vi.stubGlobal("navigator", { locks: { request } });
  const { agent } = new Pawl({ fetch: fetch as typeof globalThis.fetch });
  await expect(agent.whoAmI({})).rejects.toMatchObject({ reason: "SESSION_EXPIRED" });
  await expect(agent.whoAmI({})).resolves.toEqual({});
  vi.unstubAllGlobals();
});
