// SPDX-License-Identifier: Apache-2.0

package hns

// results maps HRESULTs of HNS to errors of this package. The keys are the numbers
// that hcsshim reports. The number of a Win32 error is its code in winerror.h, without the
// facility. A result that is not in the map has no special meaning.
var results = map[uint32]error{
	// HNS is called over RPC and may restart. These results mean that HNS does not run.
	0x426:      ErrNotRunning, // ERROR_SERVICE_NOT_ACTIVE
	0x6b5:      ErrNotRunning, // RPC_S_UNKNOWN_IF
	0x6ba:      ErrNotRunning, // RPC_S_SERVER_UNAVAILABLE
	0x6be:      ErrNotRunning, // RPC_S_CALL_FAILED
	0x6bf:      ErrNotRunning, // RPC_S_CALL_FAILED_DNE
	0x6d9:      ErrNotRunning, // EPT_S_NOT_REGISTERED
	0x803b0020: ErrNotRunning, // HCN_E_MANAGER_STOPPED

	0x490:      ErrNotFound, // ERROR_NOT_FOUND
	0x803b0001: ErrNotFound, // HCN_E_NETWORK_NOT_FOUND
	0x803b0002: ErrNotFound, // HCN_E_ENDPOINT_NOT_FOUND
	0x803b0008: ErrNotFound, // HCN_E_POLICY_NOT_FOUND

	0x34:       ErrExists, // ERROR_DUP_NAME
	0xb7:       ErrExists, // ERROR_ALREADY_EXISTS
	0x1392:     ErrExists, // ERROR_OBJECT_ALREADY_EXISTS
	0x803b0012: ErrExists, // HCN_E_POLICY_ALREADY_EXISTS
	0x803b0013: ErrExists, // HCN_E_PORT_ALREADY_EXISTS

	0x32:       ErrNotSupported, // ERROR_NOT_SUPPORTED
	0x80004001: ErrNotSupported, // E_NOTIMPL
	0x803b0015: ErrNotSupported, // HCN_E_REQUEST_UNSUPPORTED
}
