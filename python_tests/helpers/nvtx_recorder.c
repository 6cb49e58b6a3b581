// Stands in for Nsight: NVTX loads the library that NVTX_INJECTION64_PATH names and lets it put
// functions in place of its own. This one writes a line "push DOMAIN NAME" or "pop DOMAIN" to the
// file NVTX_RECORD. https://github.com/NVIDIA/NVTX, "tools" section of the C API headers.
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE* record;

// Handles of domains and of registered strings are the strings themselves.
static nvtxDomainHandle_t NVTX_API create_domain(const char* name) {
  return (nvtxDomainHandle_t)strdup(name);
}

static nvtxStringHandle_t NVTX_API register_string(nvtxDomainHandle_t domain, const char* text) {
  return (nvtxStringHandle_t)strdup(text);
}

static int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  const char* name = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED
                         ? (const char*)event->message.registered
                         : event->message.ascii;
  fprintf(record, "push %s %s\n", (const char*)domain, name);
  return 0;
}

static int NVTX_API pop(nvtxDomainHandle_t domain) {
  fprintf(record, "pop %s\n", (const char*)domain);
  return 0;
}

// Every library with NVTX inside calls this once.
__attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_table) {
  if (record == NULL) record = fopen(getenv("NVTX_RECORD"), "w");
  const NvtxExportTableCallbacks* callbacks =
      (const NvtxExportTableCallbacks*)get_table(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable functions;
  unsigned int size;
  if (record == NULL ||
      !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size)) {
    return 0;
  }
  *functions[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
  *functions[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *functions[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return 1;
}
