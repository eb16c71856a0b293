/* A compiler whose machine code is the source, and which refuses sources with "#error" in them. */
#include <stdlib.h>
#include <string.h>

typedef int status;
struct program { char *source; };

status nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
status nvrtcCreateProgram(struct program **made, const char *source, const char *name, int headers,
                          const char *const *texts, const char *const *names) {
    (void)name; (void)headers; (void)texts; (void)names;
    *made = malloc(sizeof **made);
    (*made)->source = strdup(source);
    return 0;
}
status nvrtcCompileProgram(struct program *program, int count, const char *const *options) {
    return count < 1 || strncmp(options[0], "--gpu-architecture=sm_", 22) ? 5 : strstr(program->source, "#error") ? 6 : 0;
}
status nvrtcDestroyProgram(struct program **program) {
    free((*program)->source);
    free(*program);
    *program = 0;
    return 0;
}
status nvrtcGetCUBINSize(struct program *program, size_t *size) { *size = strlen(program->source); return 0; }
status nvrtcGetCUBIN(struct program *program, char *code) { memcpy(code, program->source, strlen(program->source)); return 0; }
status nvrtcGetProgramLogSize(struct program *program, size_t *size) { (void)program; *size = 22; return 0; }
status nvrtcGetProgramLog(struct program *program, char *log) { (void)program; strcpy(log, "kernel.cu(1): refused"); return 0; }
status nvrtcGetNumSupportedArchs(int *count) { *count = 2; return 0; }
status nvrtcGetSupportedArchs(int *numbers) { numbers[0] = 80; numbers[1] = 90; return 0; }
const char *nvrtcGetErrorString(status code) { (void)code; return "NVRTC_ERROR_COMPILATION"; }
