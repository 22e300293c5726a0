/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for computenetwork.dll and vmcompute.dll under Wine: each call is a
 * request to a server on 127.0.0.1, port $FAKE_HNS_PORT, over one connection.
 *
 *   request   u32 size, then as strings that end with NUL: function, GUID, handle, document
 *   response  u32 size, then as strings that end with NUL: HRESULT in hexadecimal, handle, document, error document
 *
 * Integers are little-endian, GUIDs and handles text. A server that is not there
 * is an HNS that does not run.
 *
 *   x86_64-w64-mingw32-gcc -shared -o computenetwork.dll hcn.c -lws2_32 -lole32
 */
#include <winsock2.h>
#include <windows.h>
#include <objbase.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __declspec(dllexport) HRESULT WINAPI

typedef unsigned long long handle;

/* What remote procedure calls say of a service that does not run, or stopped. */
#define NOT_RUNNING HRESULT_FROM_WIN32(1717)
#define STOPPED HRESULT_FROM_WIN32(1722)

static SRWLOCK lock = SRWLOCK_INIT;
static SOCKET server = INVALID_SOCKET;

static char *utf8(const wchar_t *wide)
{
	if (!wide)
		return _strdup("");
	int size = WideCharToMultiByte(CP_UTF8, 0, wide, -1, NULL, 0, NULL, NULL);
	char *text = malloc(size);
	WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, size, NULL, NULL);
	return text;
}

/* The caller frees what it is given as COM does. */
static wchar_t *com_string(const char *text)
{
	int size = MultiByteToWideChar(CP_UTF8, 0, text, -1, NULL, 0);
	wchar_t *wide = CoTaskMemAlloc(size * sizeof *wide);
	MultiByteToWideChar(CP_UTF8, 0, text, -1, wide, size);
	return wide;
}

static int transfer(int (*f)(SOCKET, char *, int), char *data, int size)
{
	while (size > 0) {
		int n = f(server, data, size);
		if (n <= 0)
			return 0;
		data += n;
		size -= n;
	}
	return 1;
}

static int send_some(SOCKET s, char *data, int size) { return send(s, data, size, 0); }
static int receive_some(SOCKET s, char *data, int size) { return recv(s, data, size, 0); }

static int connect_server(void)
{
	static int started;
	WSADATA data;
	struct sockaddr_in to = { .sin_family = AF_INET };
	const char *port = getenv("FAKE_HNS_PORT");

	if (!started)
		started = WSAStartup(MAKEWORD(2, 2), &data) == 0;
	to.sin_port = htons(port ? atoi(port) : 0);
	to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	server = socket(AF_INET, SOCK_STREAM, 0);
	BOOL at_once = 1;
	setsockopt(server, IPPROTO_TCP, TCP_NODELAY, (char *)&at_once, sizeof at_once);
	if (connect(server, (struct sockaddr *)&to, sizeof to) == 0)
		return 1;
	closesocket(server);
	server = INVALID_SOCKET;
	return 0;
}

static char *exchange(char *request, unsigned size)
{
	unsigned answer;
	char *text;

	if (!transfer(send_some, request, size) || !transfer(receive_some, (char *)&answer, sizeof answer))
		return NULL;
	text = malloc(answer);
	if (transfer(receive_some, text, answer))
		return text;
	free(text);
	return NULL;
}

static HRESULT call(const char *function, const GUID *guid, handle h, const wchar_t *document,
		    handle *opened, wchar_t **out, wchar_t **error)
{
	char id[40] = "", number[24], *text = utf8(document), *request, *answer, *at;
	HRESULT result;

	if (guid)
		sprintf(id, "%08lx-%04x-%04x-%02x%02x-%02x%02x%02x%02x%02x%02x", guid->Data1, guid->Data2, guid->Data3,
			guid->Data4[0], guid->Data4[1], guid->Data4[2], guid->Data4[3],
			guid->Data4[4], guid->Data4[5], guid->Data4[6], guid->Data4[7]);
	sprintf(number, "%llu", h);
	unsigned body = strlen(function) + strlen(id) + strlen(number) + strlen(text) + 4;
	request = malloc(sizeof body + body);
	memcpy(request, &body, sizeof body);
	at = request + sizeof body;
	at += sprintf(at, "%s", function) + 1;
	at += sprintf(at, "%s", id) + 1;
	at += sprintf(at, "%s", number) + 1;
	strcpy(at, text);
	free(text);

	AcquireSRWLockExclusive(&lock);
	if (server == INVALID_SOCKET && !connect_server()) {
		ReleaseSRWLockExclusive(&lock);
		free(request);
		return NOT_RUNNING;
	}
	answer = exchange(request, sizeof body + body);
	if (!answer) {
		closesocket(server);
		server = INVALID_SOCKET;
	}
	ReleaseSRWLockExclusive(&lock);
	free(request);
	if (!answer)
		return STOPPED;

	at = answer;
	result = (HRESULT)strtoul(at, NULL, 16);
	at += strlen(at) + 1;
	if (opened)
		*opened = strtoull(at, NULL, 10);
	at += strlen(at) + 1;
	if (out && *at)
		*out = com_string(at);
	at += strlen(at) + 1;
	if (error && *at)
		*error = com_string(at);
	free(answer);
	return result;
}

#define OBJECTS(Kind, Kinds) \
	EXPORT HcnEnumerate##Kinds(const wchar_t *query, wchar_t **out, wchar_t **error) \
	{ return call("Enumerate" #Kind, NULL, 0, query, NULL, out, error); } \
	EXPORT HcnOpen##Kind(const GUID *id, handle *opened, wchar_t **error) \
	{ return call("Open" #Kind, id, 0, NULL, opened, NULL, error); } \
	EXPORT HcnModify##Kind(handle h, const wchar_t *settings, wchar_t **error) \
	{ return call("Modify" #Kind, NULL, h, settings, NULL, NULL, error); } \
	EXPORT HcnQuery##Kind##Properties(handle h, const wchar_t *query, wchar_t **out, wchar_t **error) \
	{ return call("Query" #Kind, NULL, h, query, NULL, out, error); } \
	EXPORT HcnDelete##Kind(const GUID *id, wchar_t **error) \
	{ return call("Delete" #Kind, id, 0, NULL, NULL, NULL, error); } \
	EXPORT HcnClose##Kind(handle h) \
	{ return call("Close" #Kind, NULL, h, NULL, NULL, NULL, NULL); }

OBJECTS(Network, Networks)
OBJECTS(Endpoint, Endpoints)
OBJECTS(LoadBalancer, LoadBalancers)

EXPORT HcnCreateLoadBalancer(const GUID *id, const wchar_t *settings, handle *opened, wchar_t **error)
{
	return call("CreateLoadBalancer", id, 0, settings, opened, NULL, error);
}

EXPORT HcnCreateEndpoint(handle network, const GUID *id, const wchar_t *settings, handle *opened, wchar_t **error)
{
	return call("CreateEndpoint", id, network, settings, opened, NULL, error);
}

EXPORT HNSCall(const wchar_t *method, const wchar_t *path, const wchar_t *document, wchar_t **out)
{
	char *text = utf8(path), function[128];
	HRESULT result;

	snprintf(function, sizeof function, "HNSCall %s", text);
	free(text);
	result = call(function, NULL, 0, document, NULL, out, NULL);
	return result;
}
