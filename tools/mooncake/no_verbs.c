/* A libibverbs without devices, for Mooncake's package over TCP on machines that have none: the package is linked with
 * it. Only the search for devices is ever called, and finds none. no_verbs.map gives the names their versions. */

#include <errno.h>
#include <stddef.h>

static void *no_devices[1];

void **ibv_get_device_list(int *count) {
    if (count)
        *count = 0;
    return no_devices;
}

void ibv_free_device_list(void **list) { (void)list; }

int ibv_fork_init(void) { return 0; }

#define WITHOUT_DEVICE(name) \
    long name(void) { errno = ENOSYS; return 0; }

WITHOUT_DEVICE(_ibv_query_gid_ex)
WITHOUT_DEVICE(ibv_ack_async_event)
WITHOUT_DEVICE(ibv_ack_cq_events)
WITHOUT_DEVICE(ibv_alloc_pd)
WITHOUT_DEVICE(ibv_close_device)
WITHOUT_DEVICE(ibv_create_comp_channel)
WITHOUT_DEVICE(ibv_create_cq)
WITHOUT_DEVICE(ibv_create_qp)
WITHOUT_DEVICE(ibv_dealloc_pd)
WITHOUT_DEVICE(ibv_dereg_mr)
WITHOUT_DEVICE(ibv_destroy_comp_channel)
WITHOUT_DEVICE(ibv_destroy_cq)
WITHOUT_DEVICE(ibv_destroy_qp)
WITHOUT_DEVICE(ibv_event_type_str)
WITHOUT_DEVICE(ibv_get_async_event)
WITHOUT_DEVICE(ibv_get_cq_event)
WITHOUT_DEVICE(ibv_get_device_name)
WITHOUT_DEVICE(ibv_modify_qp)
WITHOUT_DEVICE(ibv_open_device)
WITHOUT_DEVICE(ibv_query_device)
WITHOUT_DEVICE(ibv_query_gid)
WITHOUT_DEVICE(ibv_query_port)
WITHOUT_DEVICE(ibv_query_qp)
WITHOUT_DEVICE(ibv_reg_mr)
WITHOUT_DEVICE(ibv_reg_mr_iova2)
WITHOUT_DEVICE(ibv_wc_status_str)
