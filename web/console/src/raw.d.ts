declare module "*?raw";
