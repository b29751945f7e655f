import { defineConfig } from "vite";

// Proxying gives the browser one origin, so the gateway's session cookie works. The Host header is kept.
const gateway = { target: process.env.PAWL_GATEWAY ?? "http://127.0.0.1:7600", changeOrigin: false };
export default defineConfig({ server: { host: "127.0.0.1", proxy: { "^/(rpc|stream|login|logout)": gateway } } });
