import { defineConfig } from "vite";

// The browser knows one origin, so the session of the gateway is that of the page: its Host stays as it was asked for.
const gateway = { target: process.env.PAWL_GATEWAY ?? "http://127.0.0.1:7600", changeOrigin: false };
export default defineConfig({ server: { host: "127.0.0.1", proxy: { "^/(rpc|stream|login|logout)": gateway } } });
