import { defaultClientConditions } from "vite";
import { defineConfig } from "vitest/config";

export default defineConfig({
  root: "console",
  base: "/",
  resolve: {
    // Builds for workers need no DOM. A build for browsers may set innerHTML, which the Content Security Policy forbids.
    conditions: ["worker", ...defaultClientConditions],
    alias: { "@pawl/client": new URL("client/src/index.ts", import.meta.url).pathname },
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  test: { root: "." },
  build: {
    outDir: "../../services/pawl/gateway/static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    license: { fileName: "licenses.md" },
    modulePreload: { polyfill: false },
    rolldownOptions: {
      output: { entryFileNames: "app.js", chunkFileNames: "[name].js", assetFileNames: "[name][extname]" },
    },
  },
  server: { proxy: { "^/(rpc|stream|login|runs/.*/events)": "http://127.0.0.1:7600" } },
});
